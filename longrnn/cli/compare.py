"""`longrnn compare`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from longrnn.cli.options import (
    Device,
    Quiet,
    TrustTaskCode,
    lock_output,
    pick_placement,
    warn_if_calibrated_on,
)
from longrnn.cli.results_folders import results_folder
from longrnn.errors import UserError
from longrnn.processes import is_main, start
from longrnn.units import format_length

if TYPE_CHECKING:
    from longrnn.comparison.compare import Table
    from longrnn.comparison.suites import Suite
    from longrnn.hf.opened import OpenCheckpoint

# A longer text in a cell is broken into lines of this many characters.
MAX_CELL_WIDTH = 26


def compare(
    checkpoints: Annotated[
        list[str],
        typer.Argument(
            help="Names of embedded checkpoints, or folders; CHECKPOINT+MITIGATION evaluates a "
            "checkpoint under a mitigation. The others are compared with the first one. A YAML "
            "file counts as a --suite.",
            show_default=False,
        ),
    ],
    suite: Annotated[
        list[str] | None,
        typer.Option(
            help="Name of a bundled suite, or a YAML file; may be given several times.",
            show_default="quick",
        ),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(help="Folder for the results.", show_default="results/compare/NAMES"),
    ] = None,
    trust_task_code: TrustTaskCode = False,
    device: Device = "auto",
    quiet: Quiet = False,
) -> None:
    """Compare models on the same prompts and texts, and measure what each costs.

    Writes report.html, one picture per metric, and all results as JSON Lines. The same command
    resumes an interrupted comparison; models, lengths and prompts may be added.

    Example: longrnn compare passkey-tiny 'passkey-tiny-short+forget_more' --suite quick
    """
    from longrnn.comparison.suites import read_suite
    from longrnn.hf.opened import open_checkpoint

    start()
    # A shell expands `--suite eval/suites/*.yaml`; the files after the first become arguments.
    files = [name for name in checkpoints if _is_suite(name)]
    variants = list(dict.fromkeys(name for name in checkpoints if name not in files))
    if not variants:
        raise UserError("give the checkpoints to compare: longrnn compare A B --suite quick")
    names = [*(suite or []), *files] or ["quick"]
    suites = [read_suite(name) for name in dict.fromkeys(names)]
    target = pick_placement(device)
    models = [
        open_checkpoint(variant, name=name, device=target)
        for variant, name in _labels(variants).items()
    ]
    _warn_if_calibrated(
        models, {path for one in suites for e in one.evaluations for path in e.texts}
    )
    options = {"suite": "+".join(one.name for one in suites)}
    folder = lock_output(output or results_folder("compare", variants, options=options))
    compare_and_report(models, suites, folder, trust_task_code=trust_task_code, quiet=quiet)


def compare_and_report(
    models: Sequence[OpenCheckpoint],
    suites: Sequence[Suite],
    folder: Path,
    *,
    trust_task_code: bool = False,
    quiet: bool = False,
) -> None:
    """Compares models, prints the tables, and writes the report; resumes what is in the folder."""
    from longrnn.comparison import compare as measure
    from longrnn.diagnostics.comparison import write_report

    cells = measure.compare(
        models, suites, output=folder, trust_task_code=trust_task_code, quiet=quiet
    )
    if not is_main():
        return
    report, *_ = write_report(
        cells,
        folder,
        models={one.name: _description(one) for one in models},
        suites={one.name: one.text for one in suites},
    )
    for table in measure.tables(cells):
        print_comparison(table)
    if len(models) > 1:
        reference = models[0].name
        typer.echo(f"[95 % intervals]; below a value, its difference from {reference}, paired")
    typer.echo(f"{folder / 'comparison.jsonl'}\n{report}")


def print_comparison(table: Table) -> None:
    """Prints one row per length and model, with one column per metric."""
    from rich.table import Table as Grid

    from longrnn.console import print_table

    grid = Grid(title=f"suite {table.suite}", title_justify="left", show_lines=True)
    grid.add_column("length", justify="right")
    grid.add_column("model", overflow="fold")
    for metric in table.metrics:
        grid.add_column(metric, max_width=MAX_CELL_WIDTH)
    for at, model, cells in table.rows:
        texts = ["\n".join(filter(None, (str(c), c.below()))) if c else "–" for c in cells]
        grid.add_row("–" if at is None else format_length(at), model, *texts)
    longest = max(len(model) for _, model, _ in table.rows)
    print_table(grid, 16 + longest + (MAX_CELL_WIDTH + 3) * len(table.metrics))


def _warn_if_calibrated(models: Sequence[OpenCheckpoint], texts: set[Path]) -> None:
    """Prints a warning for every text that a mitigation was calibrated on."""
    from longrnn.evaluation.texts import read_documents

    for one in models:
        if one.mitigation is not None:
            for path in sorted(texts):
                warn_if_calibrated_on(one.model, read_documents([path], one.tokenizer, one.model))


def _is_suite(name: str) -> bool:
    return name.endswith((".yaml", ".yml")) and Path(name).is_file()


def _labels(variants: Sequence[str]) -> dict[str, str]:
    """A short name for each variant: without parent folders, if the names then still differ."""
    from longrnn.hf.names import split_spec

    parts = {variant: split_spec(variant) for variant in variants}
    short = {
        variant: "+".join(filter(None, (Path(name).name, own)))
        for variant, (name, own) in parts.items()
    }
    taken = list(short.values())
    return {variant: name if taken.count(name) == 1 else variant for variant, name in short.items()}


def _description(model: OpenCheckpoint) -> str:
    under = f" under {model.mitigation}" if model.mitigation else ""
    return f"{model.checkpoint}{under}, fingerprint {model.model.fingerprint()}, on {model.device}"
