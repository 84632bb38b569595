"""Writes the report of a gradient diagnosis."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from pydantic_core import to_json

from longrnn.diagnostics.curves import curves
from longrnn.diagnostics.gradients import BINS, HIGHEST, LOWEST, Row
from longrnn.evaluation.figures import new_figure, png
from longrnn.evaluation.report import Picture, write_page
from longrnn.files import write_atomic

# The columns of the table on the terminal and in the page.
COLUMNS = {
    "model": "model",
    "layer": "layer",
    "verdict": "verdict",
    "factor": "factor per token",
    "half_life": "halved every",
    "radius": "spectral radius",
    "singular": "singular value",
    "loss": "loss",
    "gradient": "its gradient",
}
CAPTIONS = {
    "norms": "Norm of the loss's gradient in the state, by distance in tokens: geometric mean over "
    "sequences. A straight line is a constant factor per token; a falling one vanishes.",
    "weights": "Entries of the gradient of the recurrent weights, of the loss at the last token, "
    "by their size, for each sequence length.",
}
DEFINITION = (
    "Norms are those of ∂loss_T/∂h_k: h_k is the state that token k passes to token k + 1, and "
    "loss_T the loss at the last scored token alone. The factor per token is fitted to the far "
    "half of the distances T − k; the norm is halved every so many tokens. Jacobians are those of "
    "one layer's state after a token with "
    "respect to its state before it, at the input that the layer reads there: the mean spectral "
    "radius and the largest singular value along one sequence. Loss and gradient are those of all "
    "scored tokens and all weights."
)


def write_report(about: Mapping[str, Any], rows: Sequence[Row], folder: Path) -> list[Path]:
    """Writes `gradients.jsonl`, the pictures and `report.html`.

    Args:
        about: models (fingerprints by name), `task` and `lengths`, the first line of the record.
        rows: of `measure`, each with its `model`.
        folder: created if it does not exist.

    Returns:
        The files, the report first.
    """
    record = folder / "gradients.jsonl"
    lines = [to_json(line, inf_nan_mode="null").decode() for line in (about, *rows)]
    write_atomic(record, "".join(f"{line}\n" for line in lines))
    drawn = {"norms": _norms(rows), "weights": _weights(rows)}
    pictures = [Picture(name, CAPTIONS[name], data) for name, data in drawn.items()]
    values = {"about": about, "columns": COLUMNS, "rows": table(rows), "definition": DEFINITION}
    return [*write_page("gradients.html", folder, pictures, values), record]


def table(rows: Sequence[Row]) -> list[list[str]]:
    """Returns the rows as texts, one per column."""
    return [[_shown(row[name]) for name in COLUMNS] for row in rows]


def _shown(value: Any) -> str:
    return "–" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)


def _norms(rows: Sequence[Row]) -> bytes:
    deep = any(row["layer"] for row in rows)
    drawn = {
        f"{row['model']}, layer {row['layer']}" if deep else row["model"]: [
            (distance, norm) for distance, norm in enumerate(row["norm"], start=1) if norm > 0
        ]
        for row in rows
    }
    return curves(drawn, across="distance T − k (tokens)", up="norm of ∂loss_T/∂h_k", log=True)


def _weights(rows: Sequence[Row]) -> bytes:
    """Plots histograms, one panel per model, all layers together."""
    names = list(dict.fromkeys(row["model"] for row in rows))
    columns, lines = min(2, len(names)), -(-len(names) // 2)
    figure = new_figure(4.2 * columns + 0.6, 2.8 * lines + 0.4)
    grid = figure.subplots(lines, columns, squeeze=False, sharey=True)
    for panel in grid.flat[len(names) :]:
        panel.remove()
    for panel, name in zip(grid.flat, names, strict=False):
        own = [row["histograms"] for row in rows if row["model"] == name]
        for length in own[0]:
            counts = np.sum([one[length] for one in own], axis=0)
            edges = np.linspace(LOWEST, HIGHEST, BINS + 1)
            panel.stairs(counts / counts.sum(), edges, label=f"length {length}", lw=1.2)
        panel.set(title=name, xlabel="log₁₀ |gradient|", xticks=range(LOWEST, HIGHEST + 1, 4))
        panel.legend(fontsize=8)
    figure.supylabel("share of entries", fontsize=10)
    return png(figure)
