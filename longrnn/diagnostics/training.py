"""The report of training runs: their metrics by step, one line for each run."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from longrnn.config import flat
from longrnn.diagnostics.pages import Picture, write_page
from longrnn.diagnostics.plots import new_figure, png
from longrnn.errors import UserError

Row = dict[str, Any]

# What every run logs; further metrics of its task follow.
CAPTIONS = {
    "loss": "Mean loss of the steps since the row before.",
    "grad_norm": "Norm of the gradient before clipping, on a logarithmic scale.",
    "learning_rate": "Learning rate of the step, before the factors of learning_rate_scale.",
    "tokens_per_second": "Tokens a second of the step that was logged, over all processes.",
}
COUNTS = ("step", "tokens")


class Run(NamedTuple):
    """One run: a name of its own, its rows of metrics, its configuration as dotted keys."""

    name: str
    rows: list[Row]
    settings: dict[str, Any]

    def values(self, metric: str) -> list[float]:
        """The finite values of a metric, in order."""
        found = [row[metric] for row in self.rows if metric in row]
        return [value for value in found if math.isfinite(value)]

    def last(self, metric: str) -> float | None:
        """The last finite value, where there is one."""
        return next(reversed(self.values(metric)), None)

    def least(self, metric: str) -> float | None:
        """The least finite value, where there is one."""
        return min(self.values(metric), default=None)

    def median(self, metric: str) -> float | None:
        """The median, where there is one."""
        values = self.values(metric)
        return median(values) if values else None


def read_runs(folders: Sequence[Path]) -> list[Run]:
    """Reads the metrics of runs, also while they are being written.

    Raises:
        UserError: a folder without a run, or one that has logged nothing yet.
    """
    import yaml

    distinct: dict[Path, Path] = {}
    for folder in folders:
        distinct.setdefault(folder.resolve(), folder)
    short = [resolved.name for resolved in distinct]
    runs = []
    for resolved, folder in distinct.items():
        name = resolved.name
        label = name if short.count(name) == 1 else str(folder)
        recorded = folder / "train.yaml"
        settings = flat(yaml.safe_load(recorded.read_text())) if recorded.is_file() else {}
        runs.append(Run(label, read_metrics(folder), settings))
    return runs


def read_metrics(folder: Path) -> list[Row]:
    """The rows of a run's metrics.jsonl; a last line without its end is left out.

    Raises:
        UserError: no such file, no whole row, or a line that is none of metrics.
    """
    path = folder / "metrics.jsonl"
    if not path.is_file():
        begun = (folder / "train.yaml").is_file()
        there = "a run that has logged nothing yet: wait for its first logging_steps"
        missing = "no training run: give the output_dir of one"
        raise UserError(f"{folder} holds {there if begun else missing}")
    rows = []
    for line in path.read_text(errors="replace").splitlines(keepends=True):
        if not line.endswith("\n"):
            continue
        try:
            row = json.loads(line)
        except ValueError as error:
            raise UserError(
                f"{path}, line {len(rows) + 1} is not JSON ({error}): remove that line"
            ) from error
        if not isinstance(row, dict) or not set(COUNTS) <= row.keys():
            raise UserError(f"{path}, line {len(rows) + 1} is no row of metrics: remove that line")
        rows.append(row)
    if not rows:
        raise UserError(f"{path} has no whole row yet: wait for the run's first logging_steps")
    return rows


def write_report(runs: Sequence[Run], folder: Path) -> list[Path]:
    """Writes the pictures and `report.html`.

    Returns:
        The files, the report first.
    """
    logged = {name for run in runs for row in run.rows for name in row}
    names = [name for name in CAPTIONS if name in logged]
    names += sorted(logged - CAPTIONS.keys() - set(COUNTS))
    pictures = [_picture(runs, name) for name in names]
    values = {"runs": runs, "summary": summary(runs), "differences": differences(runs)}
    return write_page("training.html", folder, pictures, values)


def summary(runs: Sequence[Run]) -> str:
    """Where the runs stand, in one sentence."""
    stands = []
    for run in runs:
        loss, steps = run.last("loss"), run.rows[-1]["step"]
        said = "no finite loss" if loss is None else f"loss {loss:.4g}"
        of = run.settings.get("max_steps")
        stands.append(f"{run.name}: {said} after {steps:,}{f' of {of:,}' if of else ''} steps")
    return f"{'; '.join(stands)}."


def differences(runs: Sequence[Run]) -> list[tuple[str, list[Any]]]:
    """Settings that are not the same in all runs, with the value of each run."""
    keys = dict.fromkeys(key for run in runs for key in run.settings if key != "output_dir")
    table = [(key, [run.settings.get(key, "–") for run in runs]) for key in keys]
    return [(key, values) for key, values in table if any(v != values[0] for v in values)]


def _picture(runs: Sequence[Run], name: str) -> Picture:
    figure = new_figure(8.6, 3.4)
    panel = figure.subplots()
    for run in runs:
        points = [(row["step"], row[name]) for row in run.rows if name in row]
        # One row alone would be an invisible line.
        marker = "o" if len(points) < 3 else None
        panel.plot(*zip(*points, strict=True), lw=1.2, marker=marker, label=run.name)
    if name == "grad_norm":
        panel.set_yscale("log")
    if name == "tokens_per_second":
        panel.set_ylim(bottom=0)
    panel.set(xlabel="step", ylabel=name.replace("_", " "))
    if len(runs) > 1:
        panel.legend(fontsize=8)
    caption = CAPTIONS.get(name, "A score of the task, on its training batches.")
    return Picture(name, caption, png(figure))
