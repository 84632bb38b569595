"""Writes the report of training runs: metrics by step, one line per run."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from longrnn.diagnostics.curves import Panel, curves
from longrnn.evaluation.report import Picture, write_page
from longrnn.training.run import COUNTS, Run

# The loss of an evaluation between the previous position and this one.
BY_POSITION = re.compile(r"eval_loss_to_(\d+)")
METRICS = (
    "By step. The loss is the mean since the previous row, the eval loss that of the validation "
    "rows; the norm of the gradient is that before clipping, the learning rate that before "
    "learning_rate_scale; speed, mfu (share of the GPU's peak in bfloat16) and peak memory are "
    "those of the logged step. Other metrics are scores of the task."
)
POSITIONS = (
    "Validation loss by position at the first and the last evaluation; each point is the mean "
    "since the one before."
)


def write_report(runs: Sequence[Run], folder: Path) -> list[Path]:
    """Write the pictures and `report.html`.

    Returns:
        The files, the report first.
    """
    logged = dict.fromkeys(name for run in runs for row in run.rows for name in row)
    panels = []
    for name in logged:
        if name not in COUNTS and not BY_POSITION.fullmatch(name):
            drawn = {run.name: [row for row in run.rows if name in row] for run in runs}
            points = {
                run: ([row["step"] for row in rows], [row[name] for row in rows])
                for run, rows in drawn.items()
            }
            panels.append(Panel(name.replace("_", " "), points, log=name == "grad_norm"))
    pictures = [Picture("metrics", METRICS, curves(panels, across="step"))]
    if drawn := _by_position(runs):
        data = curves([Panel("nats per token", drawn)], across="tokens read")
        pictures.append(Picture("eval_loss_by_position", POSITIONS, data))
    values = {"runs": runs, "summary": summary(runs), "differences": differences(runs)}
    return write_page("training.html", folder, pictures, values)


def summary(runs: Sequence[Run]) -> str:
    """Describe the last loss and step of each run in one sentence."""
    stands = []
    for run in runs:
        loss, steps = run.last("loss"), run.rows[-1]["step"]
        last = "no finite loss" if loss is None else f"loss {loss:.4g}"
        stands.append(f"{run.name}: {last} after {steps:,} steps")
    return f"{'; '.join(stands)}."


def differences(runs: Sequence[Run]) -> list[tuple[str, list[Any]]]:
    """Return the settings that differ between runs, with the value in each run."""
    keys = dict.fromkeys(key for run in runs for key in run.settings if key != "output_dir")
    table = [(key, [run.settings.get(key, "–") for run in runs]) for key in keys]
    return [(key, values) for key, values in table if any(v != values[0] for v in values)]


def _by_position(runs: Sequence[Run]) -> dict[str, tuple[list[int], list[float]]]:
    """Return positions and losses of the first and the last evaluation of each run."""
    drawn = {}
    for run in runs:
        found = [
            (row["step"], {int(m[1]): row[name] for name in row if (m := BY_POSITION.match(name))})
            for row in run.rows
        ]
        evaluations = [(step, curve) for step, curve in found if curve]
        for step, curve in evaluations[:1] + evaluations[-1:]:
            drawn[f"{run.name}, step {step:,}"] = [*curve], [*curve.values()]
    return drawn
