"""Options that several commands share."""

from __future__ import annotations

from typing import Annotated

import typer

Checkpoint = Annotated[
    str, typer.Argument(help="Name of an embedded checkpoint, or a folder.", show_default=False)
]
Device = Annotated[
    str, typer.Option(help="Where to run: cpu, cuda, cuda:1; auto takes cuda where there is one.")
]
Quiet = Annotated[bool, typer.Option("--quiet", help="No progress.")]


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
