"""`longrnn replay`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from longrnn.cli.options import Device, pick_device


def replay(
    file: Annotated[Path, typer.Argument(help="A nonfinite-*.pt that a training run wrote.")],
    device: Device = "cpu",
) -> None:
    """Run a batch with a non-finite loss or gradient again, and print the sizes of all tensors.

    Example: longrnn replay runs/mine/nonfinite-00000137.pt
    """
    from longrnn.training.replay import replay

    content, seen = replay(file, pick_device(device))
    place = "step {step}, micro-batch {micro_batch}, process {process}".format(**content)
    typer.echo(f"then  {place}: {content['where']}")
    typer.echo(f"now   {seen.where or f'the loss is {seen.loss:.4g} and all is finite'}")
    typer.echo(f"\n{'output of':<32}{'rms':>12}{'largest':>12}")
    for name, size in seen.sizes.items():
        typer.echo(f"{name:<32}{size.rms:>12.4g}{size.largest:>12.4g}")
    typer.echo(f"\n{'gradient of':<32}{'norm':>12}")
    for name, norm in seen.gradients.items():
        typer.echo(f"{name:<32}{norm:>12.4g}")
