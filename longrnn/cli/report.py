"""`longrnn report`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from longrnn.cli.command import Argument
from longrnn.cli.options import Output
from longrnn.console import say
from longrnn.errors import UserError
from longrnn.options import Options

if TYPE_CHECKING:
    from longrnn.training.run import Run

# Metrics that say nothing about how good a model is.
COSTS = ("step", "tokens", "grad_norm", "learning_rate", "tokens_per_second")


class Report(Options):
    """Which runs are compared."""

    runs: Annotated[list[Path], Argument("RUN")]
    """output_dir of one or several training runs."""
    baseline: str | None = None
    """Print differences from the runs with this KEY=VALUE, paired by seed, such as
    model.position.kind=none."""


def report(report: Report, output: Output) -> None:
    """Plot loss, gradient norm, learning rate and tokens/s of training runs, finished or running.

    Example: longrnn report runs/* --baseline model.position.kind=none
    """
    from longrnn.reporting.training import summary, write_report
    from longrnn.training.run import read_runs

    runs = read_runs(report.runs)
    lines = [] if report.baseline is None else differences(runs, report.baseline)
    folder = output.folder("training", [str(run) for run in report.runs])
    files = write_report(runs, folder)
    say(*summary(runs), *lines, *files)


def differences(runs: Sequence[Run], baseline: str) -> list[str]:
    """Return a table in Markdown: the last metrics of runs, less those of the baseline's runs.

    Two runs are a pair if they differ in this key alone, and in the options of a kind.

    Raises:
        UserError: `baseline` is not YAML, or no two runs are a pair.
    """
    from longrnn.intervals import mean
    from longrnn.yaml import parse_yaml

    key, _, text = baseline.partition("=")
    try:
        value = str(parse_yaml(text))
    except ValueError as error:
        raise UserError(f"--baseline {baseline} is not YAML ({error}): write KEY=VALUE") from error
    family = f"{key.removesuffix('.kind')}."  # of the kind's options

    def settings(run: Run, *without: str) -> frozenset[str]:
        return frozenset(
            f"{name}={setting}"
            for name, setting in run.settings.items()
            if name not in ("output_dir", *without) and (name == key or not name.startswith(family))
        )

    base = {settings(run, key): run for run in runs if str(run.settings.get(key)) == value}
    groups: dict[frozenset[str], list[tuple[Run, Run]]] = {}
    for run in runs:
        partner = base.get(settings(run, key))
        if partner is not None and str(run.settings.get(key)) != value:
            groups.setdefault(settings(run, "seed"), []).append((run, partner))
    if not groups:
        raise UserError(
            f"no two runs differ in {key!r} alone, where it is {value} in the other: give both"
        )
    common = frozenset.intersection(*(settings(run) for run in runs))
    names = dict.fromkeys(name for run in runs for row in run.rows[-2:] for name in row)
    metrics = [name for name in names if name not in COSTS]
    rows = [["runs", "pairs", *(f"{name}, difference from {baseline}" for name in metrics)]]
    rows.append(["---"] * len(rows[0]))
    for group, pairs in groups.items():
        row = [", ".join(sorted(group - common)), str(len(pairs))]
        for name in metrics:
            ends = [(run.last(name), other.last(name)) for run, other in pairs]
            less = [a - b for a, b in ends if a is not None and b is not None]
            row.append(mean(less).show(".4g", "+") if less else "–")
        rows.append(row)
    return [f"| {' | '.join(row)} |" for row in rows]
