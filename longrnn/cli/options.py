"""Options that several commands share, and what they mean."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from longrnn.cli.command import Argument
from longrnn.options import Options

# Characters of the name of a default folder for results; longer ones are cut.
LONGEST = 72


class Where(Options):
    """What is done to models, and where."""

    mitigation: str | None = None
    """Mitigation of state collapse: 'sliding_window(window=8192)', or a file of `calibrate`."""
    device: str = "auto"
    """Where to run: cpu, cuda, cuda:1; auto uses cuda if it is available."""


class Models(Where):
    """Models to evaluate."""

    checkpoints: Annotated[list[str], Argument("CHECKPOINT")]
    """Names of embedded checkpoints, folders, or organisation/model on the Hub, also with
    +MITIGATION or +DTYPE; the others are compared with the first one."""


class Model(Where):
    """One model."""

    checkpoint: Annotated[str, Argument("CHECKPOINT")]
    """Name of an embedded checkpoint, a folder, or organisation/model on the Hub."""


class Output(Options):
    """Where results go."""

    output: Path | None = None
    """Folder for the results (default: results/COMMAND/NAMES)."""


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
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda" and processes.size() > 1:
        device = f"cuda:{processes.local_rank()}"
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise UserError(
            f"device {device!r} cannot be used here: give cpu or auto, or start fewer processes"
        ) from error
    return device


def results_folder(
    command: str,
    checkpoints: Sequence[str],
    mitigation: str | None = None,
) -> Path:
    """Return the default folder for the results of a command, which a person can type.

    Results are found by the model, whatever the folder is called. So models whose names differ only
    in other characters, or behind the longest name, may share a folder.

    Args:
        command: name of the folder above it.
        checkpoints: names, or `CHECKPOINT+MITIGATION`.
        mitigation: applied to all of them, after their own.
    """
    from longrnn.hf.names import split_spec

    specs = [(Path(path).resolve().name, own) for path, own in map(split_spec, checkpoints)]
    name = "--".join("+".join(filter(None, (*spec, mitigation))) for spec in specs).lower()
    return Path("results") / command / re.sub(r"[^a-z0-9._-]+", "-", name)[:LONGEST].strip("-._")


def lock_output(folder: Path) -> Path:
    """Locks the folder for results until this command ends, and returns it.

    Raises:
        UserError: another process is writing there.
    """
    from longrnn.locks import hold
    from longrnn.processes import on_main

    on_main(lambda: hold(folder, instead="choose another --output"))
    return folder
