"""`longrnn report`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from longrnn.cli.command import Argument
from longrnn.cli.options import Output, lock_output, results_folder
from longrnn.errors import UserError, nearest
from longrnn.options import Options

if TYPE_CHECKING:
    from longrnn.training.run import Run

# Metrics that say nothing about how good a model is.
COSTS = ("step", "tokens", "grad_norm", "learning_rate", "tokens_per_second", "peak_memory_gib")
# Pairs of runs that a verdict needs: two pairs may agree by chance.
LEAST_PAIRS = 3


class Report(Options):
    """Which runs are compared."""

    runs: Annotated[list[Path], Argument("RUN")]
    """output_dir of one or several training runs."""
    baseline: str | None = None
    """Print differences from the runs with this KEY=VALUE, paired by seed, such as
    model.position.kind=none."""


def report(report: Report, output: Output) -> None:
    """Plot loss, gradient norm, learning rate and tokens/s of training runs, finished or running.

    Example: longrnn report runs/grid/* --baseline model.position.kind=none
    """
    from longrnn.diagnostics.training_report import summary, write_report
    from longrnn.training.grid import DIVERGED
    from longrnn.training.run import read_runs

    runs = report.runs
    diverged = [run for run in runs if (run / DIVERGED).is_file()]
    for run in diverged:
        typer.echo(f"{run}: diverged; {(run / DIVERGED).read_text().strip()}")
    found = read_runs([run for run in runs if run not in diverged])
    lines = [] if report.baseline is None else differences(found, report.baseline)
    folder = output.output or results_folder("training", [str(run) for run in runs])
    written = write_report(found, lock_output(folder))
    typer.echo("\n".join([summary(found), *lines, *map(str, written)]))


def differences(runs: Sequence[Run], baseline: str) -> list[str]:
    """A table in Markdown: the last metrics of runs, less those of runs with the baseline's value.

    Two runs are a pair if they differ in this key alone, and in the options of a kind.

    Raises:
        UserError: the runs do not have this key, or there is no pair.
    """
    from longrnn.intervals import mean
    from longrnn.text import parse_yaml

    key, _, text = baseline.partition("=")
    keys = dict.fromkeys(name for run in runs for name in run.settings)
    varied = [
        name for name in keys if name != "output_dir" and len({_of(run, name) for run in runs}) > 1
    ]
    if key not in varied:
        raise UserError(f"these runs do not differ in {key!r}: {nearest(key, varied)}")
    value = str(parse_yaml(text))
    # Another kind has other options.
    family = key.removesuffix("kind") if key.endswith(".kind") else f"{key}."
    others = [name for name in varied if not name.startswith(family) and name not in (key, "seed")]
    base = {_place(run, [*others, "seed"]): run for run in runs if _of(run, key) == value}
    names = dict.fromkeys(name for run in runs for row in run.rows[-2:] for name in row)
    metrics = [name for name in names if name not in COSTS]
    groups: dict[tuple[str, ...], list[tuple[Run, Run]]] = {}
    for run in runs:
        partner = base.get(_place(run, [*others, "seed"]))
        if partner is not None and partner is not run:
            groups.setdefault(_place(run, [*others, key]), []).append((run, partner))
    if not groups:
        raise UserError(f"no two runs differ in {key} alone, one of them with {value}: give both")
    head = [*others, key, "pairs", *(f"{name} − {value}" for name in metrics)]
    lines = [_row(head), "| --- " * len(head) + "|"]
    for place, pairs in groups.items():
        cells: list[Any] = [*place, len(pairs)]
        for name in metrics:
            ends = [(run.last(name), other.last(name)) for run, other in pairs]
            less = [a - b for a, b in ends if a is not None and b is not None]
            cells.append(_shown(mean(less)) if less else "–")
        lines.append(_row(cells))
    return lines


def _of(run: Run, key: str) -> str:
    return str(run.settings.get(key))


def _place(run: Run, keys: Sequence[str]) -> tuple[str, ...]:
    return tuple(_of(run, key) for key in keys)


def _shown(less: Any) -> str:
    """A mean with its interval, and what it shows."""
    if less.n < 2:
        return f"{less.mean:+.4g}"
    words = "higher" if less.low > 0 else "lower" if less.high < 0 else "inconclusive"
    verdict = words if less.n >= LEAST_PAIRS else "inconclusive"
    return f"{less.mean:+.4g} [{less.low:.4g}, {less.high:.4g}] {verdict}"


def _row(cells: Sequence[Any]) -> str:
    return f"| {' | '.join(map(str, cells))} |"
