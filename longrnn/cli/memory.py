"""`longrnn diagnose memory`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from longrnn.cli.options import (
    Checkpoint,
    Device,
    Mitigation,
    Quiet,
    Texts,
    lock_output,
    pick_device,
    warn_if_calibrated_on,
)
from longrnn.cli.results_folders import results_folder
from longrnn.console import print_table
from longrnn.units import format_length, parse_lengths

if TYPE_CHECKING:
    from longrnn.evaluation.memory import MeanEffRem


def memory(
    checkpoint: Checkpoint,
    text: Texts,
    positions: Annotated[
        str, typer.Option(help="T: numbers of tokens after which the prediction is compared.")
    ] = "1k,4k,16k",
    stretches: Annotated[
        int,
        typer.Option(
            help="Maximum number of stretches from each text, each as long as the longest T."
        ),
    ] = 8,
    mitigation: Mitigation = None,
    output: Annotated[
        Path | None,
        typer.Option(help="Folder for the results.", show_default="results/memory/CHECKPOINT"),
    ] = None,
    batch_size: Annotated[int, typer.Option(help="Stretches in one batch.")] = 4,
    device: Device = "auto",
    quiet: Quiet = False,
) -> None:
    """Measure how much predictions depend on the start of the context (effective remembrance).

    EffRem_T(t) is the total variation distance between the prediction after T tokens and the
    prediction of a model that was not given the first t of them. Writes results.jsonl, pictures and
    report.html. The same command resumes an interrupted run.

    Example: longrnn diagnose memory passkey-tiny --text book.txt --positions 1k,4k,16k
    """
    from longrnn.diagnostics.effective_memory_report import summary, write_report
    from longrnn.evaluation import memory as measure
    from longrnn.evaluation.texts import read_documents
    from longrnn.hf.opened import open_checkpoint
    from longrnn.inference.engine import refuse_long

    after = parse_lengths(positions)
    opened = open_checkpoint(checkpoint, mitigation, device=pick_device(device))
    model = opened.model
    refuse_long(model, max(after))
    documents = read_documents(text, opened.tokenizer, model)
    warn_if_calibrated_on(model, documents)
    folder = lock_output(output or results_folder("memory", [checkpoint], mitigation))
    rows = measure.evaluate(
        model,
        documents,
        positions=after,
        output=folder / "results.jsonl",
        stretches=stretches,
        batch_size=batch_size,
        quiet=quiet,
    )
    found = measure.summarise(rows)
    about = {
        "checkpoint": checkpoint,
        "fingerprint": model.fingerprint(),
        "mitigation": None if model.mitigation is None else str(model.mitigation),
        "texts": [(document.name, document.sha256) for document in documents],
    }
    report, *pictures = write_report(found, about, folder)
    _print(found)
    typer.echo(summary(found))
    typer.echo("\n".join(map(str, [folder / "results.jsonl", *pictures, report])))


def _print(found: Mapping[int, Sequence[MeanEffRem]]) -> None:
    """Prints EffRem by the number of last tokens that are kept, with one column for each T."""
    from rich.table import Table

    n = next(iter(found.values()))[0].effrem.n
    intervals = " [95 %]" if n > 1 else ""
    typer.echo(f"EffRem by the last tokens kept, means over {n} stretches{intervals}")
    table = Table()
    table.add_column("kept", justify="right")
    for position in found:
        table.add_column(f"T = {format_length(position)}")
    cells = {
        (position - point.start, position): point.effrem
        for position, points in found.items()
        for point in points
    }
    powers = [kept for kept in sorted({kept for kept, _ in cells}) if kept & (kept - 1) == 0]
    for kept in powers:
        row = []
        for position in found:
            effrem = cells.get((kept, position))
            interval = f" [{effrem.low:.2f}, {effrem.high:.2f}]" if effrem and n > 1 else ""
            row.append("" if effrem is None else f"{effrem.mean:.3f}{interval}")
        table.add_row(format_length(kept), *row)
    print_table(table, 12 + 23 * len(found))
