"""Options that several commands share."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer
from pydantic import Field

from longrnn.options import Options


class Models(Options):
    """Models to evaluate."""

    checkpoints: list[str] = Field(
        description="Names of embedded checkpoints, folders, or organisation/model on the Hub. "
        "CHECKPOINT+MITIGATION evaluates a checkpoint under a mitigation, CHECKPOINT+float32 in "
        "another dtype. The others are compared with the first one.",
    )
    mitigation: str | None = Field(
        default=None,
        description="Mitigation of state collapse for all of them, such as "
        "'sliding_window(window=8192)', or a file that `longrnn calibrate` wrote.",
    )
    device: str = Field(
        default="auto",
        description="Where to run: cpu, cuda, cuda:1; auto uses cuda if it is available. balanced "
        "divides Hugging Face models among all GPUs.",
    )


class Model(Options):
    """One model."""

    checkpoint: str = Field(
        description="Name of an embedded checkpoint, a folder, or organisation/model on the Hub."
    )
    mitigation: str | None = Field(
        default=None,
        description="Mitigation of state collapse, such as 'sliding_window(window=8192)', or a "
        "file that `longrnn calibrate` wrote.",
    )
    device: str = Field(default="auto", description="Where to run: cpu, cuda, cuda:1, auto.")


class Output(Options):
    """Where results go."""

    output: Path | None = Field(
        default=None, description="Folder for the results (default: results/COMMAND/NAMES)."
    )
    quiet: bool = Field(default=False, description="Show no progress.")


Checkpoint = Annotated[
    str,
    typer.Argument(
        help="Name of an embedded checkpoint, a folder, or organisation/model on the Hub.",
        show_default=False,
    ),
]
Device = Annotated[
    str,
    typer.Option(
        help="Where to run: cpu, cuda, cuda:1; auto uses cuda if it is available. In "
        "evaluations, balanced divides Hugging Face models among all GPUs."
    ),
]
Quiet = Annotated[bool, typer.Option("--quiet", help="Show no progress.")]
Mitigation = Annotated[
    str | None,
    typer.Option(
        "--mitigation",
        metavar="SPEC",
        help="Mitigation of state collapse, such as 'sliding_window(window=8192)', or a file that "
        "`longrnn calibrate` wrote.",
    ),
]
TrainLength = Annotated[
    str | None,
    typer.Option(
        help="Length that the model was trained on.",
        show_default="length.max of the checkpoint's train.yaml",
    ),
]


def pick_device(device: str) -> str:
    """Returns the device to use: `auto` becomes cuda if it is available, else cpu.

    Of several processes on one machine, each gets its own GPU for `auto` and `cuda`.

    Raises:
        UserError: torch cannot use the device, or has fewer GPUs than there are processes.
    """
    import torch

    from longrnn import processes
    from longrnn.errors import UserError

    if device == "auto":
        # A launch without GPUs is one for the processes that it starts.
        on_cpu = os.environ.get("ACCELERATE_USE_CPU", "").lower() == "true"
        device = "cpu" if on_cpu or not torch.cuda.is_available() else "cuda"
    if device == "cuda" and processes.size() > 1:
        own, there = processes.local_rank(), torch.cuda.device_count()
        if own >= there:
            raise UserError(
                f"process {own} of this machine needs a GPU of its own, and torch can use {there}: "
                "start fewer processes, or give --device cpu"
            )
        device = f"cuda:{own}"
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise UserError(f"device {device!r} cannot be used here: give cpu or auto") from error
    return device


def pick_placement(device: str) -> str:
    """`pick_device` for commands that only evaluate, which may also divide Hugging Face models."""
    return device if device == "balanced" else pick_device(device)


def lock_output(folder: Path) -> Path:
    """Locks the folder for results until this command ends, and returns it.

    Raises:
        UserError: another process is writing there.
    """
    from longrnn.locks import Lock
    from longrnn.processes import on_main

    on_main(Lock.of_folder(folder, instead="choose another --output").acquire)
    return folder
