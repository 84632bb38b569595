"""The reports of training runs, with their metrics by step, and of gradients through time."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from longrnn.reporting.figures import Panel, curves, png
from longrnn.reporting.pages import Picture, write_page, write_records
from longrnn.units import counted

if TYPE_CHECKING:
    from longrnn.diagnostics.gradients import Record
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
# The columns of the table on the terminal and in the page.
GRADIENT_COLUMNS = {
    "model": "model",
    "layer": "layer",
    "factor": "factor per token",
    "radius": "spectral radius",
    "singular": "singular value",
}
NORMS = (
    "Norm of the loss's gradient in the state, by distance in tokens: geometric mean over "
    "sequences. A straight line is a constant factor per token; a falling line vanishes."
)
WEIGHTS = (
    "Entries of the gradient of the recurrent weights, of the loss at the last token, by their "
    "size."
)


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
    values = {"runs": runs, "summary": "; ".join(summary(runs))}
    return write_page("training.html", folder, [picture], values)


def summary(runs: Sequence[Run]) -> list[str]:
    """Describe the last finite loss and the last step of each run in a line."""
    ends = [(run.name, run.last("loss"), run.rows[-1]["step"]) for run in runs]
    return [
        f"{name}: loss {math.nan if loss is None else loss:.4g} after {counted(step, 'step')}"
        for name, loss, step in ends
    ]


def write_gradients(about: Mapping[str, Any], rows: Sequence[Record], folder: Path) -> list[Path]:
    """Write `gradients.jsonl`, the pictures and `report.html`.

    Args:
        about: models (fingerprints by name), `task` and `length`, the first line of the record.
        rows: of `measure`, each with its `model`.
        folder: created if it does not exist.

    Returns:
        The files, the report first.
    """
    record = folder / "gradients.jsonl"
    write_records(record, [about, *rows])
    layers = {f"{row['model']}, layer {row['layer']}": row for row in rows}
    norms = {name: (range(1, len(row["norm"]) + 1), row["norm"]) for name, row in layers.items()}
    weights = {name: (row["bins"], row["histogram"]) for name, row in layers.items()}
    by_distance = curves([Panel("norm of ∂loss_T/∂h_k", norms, log=True)], across="distance T − k")
    by_size = curves([Panel("number of entries", weights)], across="log₁₀ |gradient|")
    drawn = [("norms", NORMS, by_distance), ("weights", WEIGHTS, by_size)]
    pictures = [Picture(name, caption, png(figure)) for name, caption, figure in drawn]
    values = {"about": about, "columns": GRADIENT_COLUMNS, "rows": table(rows)}
    return [*write_page("gradients.html", folder, pictures, values), record]


def table(rows: Sequence[Record]) -> list[list[str]]:
    """Return the rows as texts, one per column."""
    return [[_shown(row[name]) for name in GRADIENT_COLUMNS] for row in rows]


def _shown(value: Any) -> str:
    if value is None or value != value:  # NaN
        return "–"
    return f"{value:.4g}" if isinstance(value, float) else str(value)
