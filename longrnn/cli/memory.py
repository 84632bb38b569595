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
    lock_output,
    pick_device,
    results_folder,
    warn_if_calibrated_on,
)
from longrnn.units import format_length, parse_lengths

if TYPE_CHECKING:
    from longrnn.evaluation.memory import MeanEffRem


def memory(
    checkpoint: Checkpoint,
    text: Annotated[
        list[Path],
        typer.Option(help="A text file; may be given several times.", show_default=False),
    ],
    positions: Annotated[
        str, typer.Option(help="T: after how many tokens to look at the prediction.")
    ] = "1k,4k,16k",
    stretches: Annotated[
        int, typer.Option(help="At most so many stretches of the longest T from each text.")
    ] = 8,
    mitigation: Mitigation = None,
    output: Annotated[
        Path | None,
        typer.Option(help="Folder of the results.", show_default="results/memory/CHECKPOINT"),
    ] = None,
    batch_size: Annotated[int, typer.Option(help="Stretches in one pass.")] = 4,
    device: Device = "auto",
    quiet: Quiet = False,
) -> None:
    """How much a prediction hangs on the beginning of its context (effective remembrance).

    EffRem_T(t) is the total variation between the prediction after T tokens and the one where the
    first t of them were never read. Writes results.jsonl, which an interrupted run takes up again,
    pictures and report.html.

    Example: longrnn diagnose memory passkey-tiny --text book.txt --positions 1k,4k,16k
    """
    from longrnn.diagnostics.effective_memory_report import summary, write_report
    from longrnn.evaluation import memory as measure
    from longrnn.evaluation.texts import read_documents
    from longrnn.hf.opened import open_checkpoint
    from longrnn.inference.length_limit import refuse_long
    from longrnn.mitigations import Mitigated

    asked = parse_lengths(positions)
    opened = open_checkpoint(checkpoint, mitigation, device=pick_device(device))
    model = opened.model
    refuse_long(model, max(asked))
    documents = read_documents(text, opened.tokenizer, model)
    warn_if_calibrated_on(model, documents)
    folder = lock_output(output or results_folder("memory", [checkpoint], mitigation))
    rows = measure.evaluate(
        model,
        documents,
        positions=asked,
        output=folder / "results.jsonl",
        stretches=stretches,
        batch_size=batch_size,
        quiet=quiet,
    )
    found = measure.summarise(rows)
    about = {
        "checkpoint": checkpoint,
        "fingerprint": model.fingerprint(),
        "mitigation": str(model.mitigation) if isinstance(model, Mitigated) else None,
        "texts": [(document.name, document.sha256) for document in documents],
    }
    report, *pictures = write_report(found, about, folder)
    _print(found)
    typer.echo(summary(found))
    typer.echo("\n".join(map(str, [folder / "results.jsonl", *pictures, report])))


def _print(found: Mapping[int, Sequence[MeanEffRem]]) -> None:
    """A table of EffRem by the last tokens kept, a column for each T."""
    from rich.console import Console
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
    console = Console()
    Console(width=max(console.width, 12 + 23 * len(found))).print(table)
