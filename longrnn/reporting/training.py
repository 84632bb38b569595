"""The report of training runs: metrics by step, one line per run."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from longrnn.reporting.curves import Panel, curves
from longrnn.reporting.figures import png
from longrnn.reporting.pages import Picture, write_page
from longrnn.units import counted

if TYPE_CHECKING:
    from longrnn.training.run import Run

# Keys of a row that are not metrics.
COUNTS = ("step", "tokens")
# What the caption says of each metric, if it is drawn.
EXPLAINED = {
    "loss": "The loss is the mean since the previous row.",
    "eval_loss": "The eval loss is that of the validation rows; to a position, it is that since "
    "the previous position.",
    "grad_norm": "The norm of the gradient is that before clipping.",
    "tokens_per_second": "The speed is that since the previous row.",
}


def write_report(runs: Sequence[Run], folder: Path) -> list[Path]:
    """Write the pictures and `report.html`.

    Returns:
        The files, the report first.
    """
    metrics = dict.fromkeys(name for run in runs for row in run.rows for name in row)
    panels = []
    for name in metrics:
        if name not in COUNTS:
            drawn = {
                run.name: (
                    [row["step"] for row in run.rows if name in row],
                    [row[name] for row in run.rows if name in row],
                )
                for run in runs
            }
            panels.append(Panel(name.replace("_", " "), drawn, log=name == "grad_norm"))
    caption = " ".join(["By step.", *(text for name, text in EXPLAINED.items() if name in metrics)])
    picture = Picture("metrics", caption, png(curves(panels, across="step")))
    return write_page("training.html", folder, [picture], {"runs": runs, "summary": summary(runs)})


def summary(runs: Sequence[Run]) -> str:
    """Describe the last finite loss and the last step of each run in one sentence."""
    ends = [(run.name, run.last("loss"), run.rows[-1]["step"]) for run in runs]
    return "; ".join(
        f"{name}: loss {math.nan if loss is None else loss:.4g} after {counted(step, 'step')}"
        for name, loss, step in ends
    )
