"""The report of a gradient diagnosis."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from longrnn.reporting.curves import Panel, curves
from longrnn.reporting.figures import png
from longrnn.reporting.pages import Picture, write_page, write_records

if TYPE_CHECKING:
    from longrnn.diagnostics.gradients import Record

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


def write_report(about: Mapping[str, Any], rows: Sequence[Record], folder: Path) -> list[Path]:
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
