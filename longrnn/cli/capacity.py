"""`longrnn diagnose capacity`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from longrnn.cli.options import lock_output, training_length
from longrnn.errors import UserError
from longrnn.units import format_length

if TYPE_CHECKING:
    from longrnn.studies.capacity import Member, Size


def capacity(
    checkpoints: Annotated[
        list[str],
        typer.Argument(
            help="The family: folders of runs, of three state sizes or more, each of which was "
            "trained at one length or several.",
            show_default=False,
        ),
    ],
    results: Annotated[
        list[Path],
        typer.Option(
            help="Where longrnn eval perplexity and eval passkey of these models were recorded; "
            "files, or folders with all below them. May be given several times."
        ),
    ] = [Path("results")],  # noqa: B006  (typer reads it and nobody changes it)
    output: Annotated[Path, typer.Option(help="Folder of the results.")] = Path("results/capacity"),
) -> None:
    """How long a model must be trained to forget, and how far it recalls, by its state's size.

    T_forget is the smallest training length from which on the loss on long prompts stays below 2 ×
    its largest inside; T_recall the longest prompt with more than 95 % of the passkeys recalled.
    Reads what was recorded and measures nothing. Writes capacity.jsonl and capacity.png.

    Example: longrnn diagnose capacity runs/capacity/* --results runs/capacity/results
    """
    from longrnn.diagnostics.record import state_size
    from longrnn.hf.loading import load_recurrent
    from longrnn.studies import capacity as measure
    from longrnn.studies.capacity_plot import write

    recorded = measure.read_recorded(results)
    members = []
    for name in dict.fromkeys(checkpoints):
        trained = training_length(name, None)
        if trained is None:
            raise UserError(
                f"{name} has no train.yaml that says its training length: give folders of runs"
            )
        model = load_recurrent(name)
        known = (model.fingerprint(), state_size(model), trained)
        members.append(measure.member(name, *known, recorded))
    members.sort(key=lambda one: (one.state_size, one.train_length))
    found = measure.sizes(members)
    fits = {
        "forget": measure.fit("line", {size.state_size: size.forget for size in found}),
        "recall": measure.fit("exponential", {size.state_size: size.recall for size in found}),
    }
    written = write(members, found, fits, lock_output(output))
    _print(members, found)
    for name, fitted in fits.items():
        typer.echo(f"T_{name}: {fitted}")
    typer.echo("N: thousands of numbers in the state; intervals 95 %, Student-t")
    typer.echo("\n".join(map(str, written)))


def _print(members: Sequence[Member], found: Sequence[Size]) -> None:
    """A table of the models, and one of the state sizes."""
    from rich.console import Console
    from rich.table import Table

    # Names stay whole.
    width = 90 + max(len(one.name) for one in members)
    console = Console(width=max(Console().width, width))
    table = Table()
    for name in ("model", "state", "trained on", "loss beyond / inside", "forgets robustly"):
        table.add_column(name)
    table.add_column("recalls up to")
    for one in members:
        table.add_row(
            one.name,
            f"{one.state_size:,}",
            format_length(one.train_length),
            "–" if one.beyond is None else f"{one.beyond:.2f}",
            {None: "–", True: "yes", False: "no"}[one.robust],
            {None: "–", 0: "none"}.get(one.recalled, format_length(one.recalled or 0)),
        )
    console.print(table)
    table = Table()
    for name in ("state", "T_forget", "T_recall"):
        table.add_column(name)
    for size in found:
        table.add_row(
            f"{size.state_size:,}",
            *("–" if point is None else str(point) for point in (size.forget, size.recall)),
        )
    console.print(table)
