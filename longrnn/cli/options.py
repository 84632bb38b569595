"""Options that several commands share."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from longrnn.files import file_name, plain_name

if TYPE_CHECKING:
    from longrnn.evaluation.texts import Document
    from longrnn.models import LanguageModel

Checkpoint = Annotated[
    str,
    typer.Argument(
        help="Name of an embedded checkpoint, a folder, or organisation/model of the hub.",
        show_default=False,
    ),
]
Device = Annotated[
    str, typer.Option(help="Where to run: cpu, cuda, cuda:1; auto takes cuda where there is one.")
]
Quiet = Annotated[bool, typer.Option("--quiet", help="No progress.")]
Mitigation = Annotated[
    str | None,
    typer.Option(
        "--mitigation",
        metavar="SPEC",
        help="Of state collapse, such as 'sliding_window(window=8192)', or a calibrated file.",
    ),
]
TrainLength = Annotated[
    str | None,
    typer.Option(
        help="Length the model was trained on.",
        show_default="length.max of the checkpoint's train.yaml",
    ),
]


def pick_device(device: str) -> str:
    """The device that `auto` means here.

    Raises:
        UserError: a device that torch does not have.
    """
    import torch

    from longrnn.errors import UserError

    if device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise UserError(f"device {device!r} cannot be used here: take cpu or auto") from error
    return device


def warn_if_calibrated_on(model: LanguageModel, documents: Iterable[Document]) -> None:
    """Says on standard error which texts a mitigation's numbers were taken from."""
    from longrnn.mitigations import Mitigated

    parts = model.parts if isinstance(model, Mitigated) else ()
    used = {digest for part in parts if part.calibration for digest in part.calibration.text_sha256}
    for document in documents:
        if document.sha256 in used:
            typer.echo(
                f"warning: the mitigation was calibrated on {document.name}: "
                "measure it on another text",
                err=True,
            )


def training(folder: Path) -> dict[str, Any]:
    """The configuration that a checkpoint was trained with, or nothing.

    Raises:
        UserError: its train.yaml is damaged.
    """
    from longrnn.config import read_recorded

    return read_recorded(folder)


def training_length(checkpoint: str, given: str | None) -> int | None:
    """The training length given, else that of the checkpoint's train.yaml, else None.

    Where a run carried its state, this is the length of one segment.
    """
    from longrnn.hf.loading import resolve
    from longrnn.hf.specs import split_spec
    from longrnn.units import parse_length

    if given is not None:
        return parse_length(given)
    return training(resolve(split_spec(checkpoint)[0])).get("length", {}).get("max")


def lock_output(folder: Path) -> Path:
    """Locks a folder for the results of this command, until it ends; returns the folder.

    Raises:
        UserError: another process is writing there.
    """
    from longrnn.locks import Lock

    Lock.of_folder(folder, instead="choose another --output").hold_until_exit()
    return folder


def results_folder(evaluation: str, checkpoints: Sequence[str], spec: str | None = None) -> Path:
    """Where results go when nobody says: one folder for each set of checkpoints.

    Args:
        evaluation: folder above it.
        checkpoints: names, or `CHECKPOINT+MITIGATION`.
        spec: what else tells these results from others.
    """
    from longrnn.hf.specs import split_spec

    parts: list[str | None] = []
    for checkpoint in checkpoints:
        path, own = split_spec(checkpoint)
        parts += [Path(path).resolve().name, own and plain_name(own)]
    parts.append(spec and plain_name(spec))
    return Path("results") / evaluation / file_name("+".join(part for part in parts if part))
