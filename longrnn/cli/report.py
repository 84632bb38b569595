"""`longrnn report`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from longrnn.cli.options import lock_output
from longrnn.cli.results_folders import results_folder


def report(
    runs: Annotated[list[Path], typer.Argument(help="output_dir of one or several training runs.")],
    output: Annotated[
        Path | None,
        typer.Option(help="Folder for the report.", show_default="results/training/RUNS"),
    ] = None,
) -> None:
    """Plot loss, gradient norm, learning rate and tokens/s of training runs, finished or running.

    Example: longrnn report runs/passkey-tiny-short runs/passkey-tiny
    """
    from longrnn.diagnostics.training_report import summary, write_report
    from longrnn.training.metrics import read_runs

    found = read_runs(runs)
    folder = lock_output(output or results_folder("training", [str(run) for run in runs]))
    written = write_report(found, folder)
    typer.echo(summary(found))
    typer.echo("\n".join(map(str, written)))
