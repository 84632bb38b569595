"""`longrnn diagnose capacity`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def capacity(
    checkpoints: Annotated[
        list[str],
        typer.Argument(
            help="The family: folders of training runs, with at least three different state "
            "sizes, each trained at one or several lengths and with one or several seeds.",
            show_default=False,
        ),
    ],
    results: Annotated[
        list[Path],
        typer.Option(
            help="Results of `longrnn eval perplexity` and `longrnn eval passkey` for these "
            "models: files, or folders that are searched. May be given several times."
        ),
    ] = [Path("results")],  # noqa: B006  (typer only reads it)
    output: Annotated[Path, typer.Option(help="Folder for the results.")] = Path(
        "results/capacity"
    ),
) -> None:
    """Relate the state size of models to how long they must be trained and how far they recall.

    T_forget is the smallest training length from which on the loss on long prompts stays below 2 ×
    its largest value inside the training length. T_recall is the longest prompt at which more than
    95 % of the passkeys are recalled. Models of one seed are a family of their own, and
    fits use one point for every state size and seed. Reads recorded results and measures nothing.
    Writes capacity.jsonl and capacity.png.

    Example: longrnn diagnose capacity runs/capacity/* --results runs/capacity/results
    """
    from longrnn.studies.capacity_report import report

    written = report(checkpoints, results, output)
    typer.echo("\n".join(map(str, written)))
