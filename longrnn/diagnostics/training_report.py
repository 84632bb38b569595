"""Writes the report of training runs: metrics by step, one line per run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from longrnn.diagnostics.pages import Picture, write_page
from longrnn.diagnostics.plots import new_figure, png
from longrnn.training.metrics import COUNTS, Run

# Metrics that every run logs; further metrics of its task follow.
CAPTIONS = {
    "loss": "Mean loss of the steps since the previous row.",
    "grad_norm": "Norm of the gradient before clipping, on a logarithmic scale.",
    "learning_rate": "Learning rate of the step, before the factors of learning_rate_scale.",
    "tokens_per_second": "Tokens per second of the logged step, over all processes.",
}


def write_report(runs: Sequence[Run], folder: Path) -> list[Path]:
    """Write the pictures and `report.html`.

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
    """Describe the last loss and step of each run in one sentence."""
    stands = []
    for run in runs:
        loss, steps = run.last("loss"), run.rows[-1]["step"]
        last = "no finite loss" if loss is None else f"loss {loss:.4g}"
        of = run.settings.get("max_steps")
        stands.append(f"{run.name}: {last} after {steps:,}{f' of {of:,}' if of else ''} steps")
    return f"{'; '.join(stands)}."


def differences(runs: Sequence[Run]) -> list[tuple[str, list[Any]]]:
    """Return the settings that differ between runs, with the value in each run."""
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
