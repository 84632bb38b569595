"""Writes the report of training runs: metrics by step, one line per run."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from longrnn.diagnostics.curves import Panel, curves
from longrnn.evaluation.figures import png
from longrnn.evaluation.report import Picture, write_page
from longrnn.training.run import COUNTS, Run

METRICS = (
    "By step. The loss is the mean since the previous row, the eval loss that of the validation "
    "rows, to a position from the one before; the gradient's norm is that before clipping. Speed, "
    "mfu (share of the GPU's peak in bfloat16) and memory are those of the logged step."
)


def write_report(runs: Sequence[Run], folder: Path) -> list[Path]:
    """Write the pictures and `report.html`.

    Returns:
        The files, the report first.
    """
    panels = []
    for name in dict.fromkeys(name for run in runs for row in run.rows for name in row):
        if name not in COUNTS:
            rows = {run.name: [row for row in run.rows if name in row] for run in runs}
            drawn = {
                run: ([row["step"] for row in own], [row[name] for row in own])
                for run, own in rows.items()
            }
            panels.append(Panel(name.replace("_", " "), drawn, log=name == "grad_norm"))
    picture = Picture("metrics", METRICS, png(curves(panels, across="step")))
    return write_page("training.html", folder, [picture], {"runs": runs, "summary": summary(runs)})


def summary(runs: Sequence[Run]) -> str:
    """Describe the last finite loss and the last step of each run in one sentence."""
    ends = [(run.name, run.last("loss"), run.rows[-1]["step"]) for run in runs]
    return "; ".join(
        f"{name}: loss {math.nan if loss is None else loss:.4g} after {step:,} steps"
        for name, loss, step in ends
    )
