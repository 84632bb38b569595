"""Writes the report of a comparison: tables, one picture per metric, models and suites."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from textwrap import fill
from typing import Any

from longrnn.comparison.compare import Cell, tables
from longrnn.diagnostics.loss_curves import LEGEND_WIDTH
from longrnn.diagnostics.pages import Picture, write_page
from longrnn.diagnostics.plots import lengths_axis, new_figure, png
from longrnn.files import file_name
from longrnn.intervals import Estimate
from longrnn.units import format_length

# A ratio of largest to smallest value above this gets a logarithmic axis.
WIDE = 30
# Factor by which the points of each further model are moved to the right.
BESIDE = 1.02


def write_report(
    cells: Sequence[Cell], folder: Path, *, models: Mapping[str, str], suites: Mapping[str, str]
) -> list[Path]:
    """Write the pictures and `report.html`.

    Args:
        cells: of `compare`.
        folder: of its other files.
        models: a description of each model, by name.
        suites: the YAML text of each suite, by name.

    Returns:
        The files, the report first.
    """
    grouped: dict[tuple[str, str], list[Cell]] = {}
    for cell in cells:
        grouped.setdefault((cell.suite, cell.metric), []).append(cell)
    drawn = [_picture(group, models) for group in grouped.values()]
    pictures = [picture for picture in drawn if picture is not None]
    values: dict[str, Any] = {
        "tables": tables(cells),
        "reference": next(iter(models)),
        "models": models,
        "suites": suites,
        "length": format_length,
        "failed": sum(cell.reason is not None for cell in cells),
    }
    return write_page("comparison.html", folder, pictures, values)


def _picture(cells: Sequence[Cell], models: Iterable[str]) -> Picture | None:
    """Plot one metric by length, one line per model; return None if there are no lengths."""
    drawn = [
        (cell.at, cell.estimate, cell.model)
        for cell in cells
        if cell.at is not None and cell.estimate is not None
    ]
    if not drawn:
        return None
    figure = new_figure(7.5, 4.2 + 0.17 * len({model for _, _, model in drawn}))
    panel = figure.subplots()
    for number, model in enumerate(models):
        own = [(at, estimate) for at, estimate, name in drawn if name == model]
        if not own:
            continue
        panel.errorbar(
            # Moved to the right, because equal values would hide each other.
            [at * BESIDE**number for at, _ in own],
            [estimate.mean for _, estimate in own],
            yerr=list(zip(*(_bar(estimate) for _, estimate in own), strict=True)),
            marker="o",
            ms=4,
            capsize=3,
            lw=1.4,
            alpha=0.8,
            label=fill(model, LEGEND_WIDTH),
        )
    lengths, values = [at for at, _, _ in drawn], [estimate.mean for _, estimate, _ in drawn]
    low, high = max(1, round(min(lengths) / 1.2)), round(max(lengths) * 1.2)
    lengths_axis(panel, high, least=low, measured=lengths)
    if min(values) > 0 and max(values) > WIDE * min(values):
        panel.set_yscale("log")
    elif min(values) >= 0:
        top = max(estimate.mean + _bar(estimate)[1] for _, estimate, _ in drawn)
        panel.set_ylim(-0.02 * top, 1.05 * top or 1)
    suite, metric = cells[0].suite, cells[0].metric
    panel.set(xlabel="tokens", ylabel=metric)
    figure.legend(loc="outside lower left", fontsize=8, frameon=False)
    plain = "".join(sign if sign.isalnum() else "_" for sign in f"{suite}_{metric}")
    caption = f"{metric}, suite {suite}."
    if any(_bar(estimate) != (0, 0) for _, estimate, _ in drawn):
        caption += " Bars are 95 % intervals."
    missing = list(dict.fromkeys(cell.model for cell in cells if cell.reason is not None))
    if missing:
        caption += f" Not at every length: {', '.join(missing)}."
    return Picture(file_name(plain), caption, png(figure))


def _bar(estimate: Estimate) -> tuple[float, float]:
    """Return how far an interval extends below and above its mean; zeros if there is none."""
    if not math.isfinite(estimate.high - estimate.low):
        return 0.0, 0.0
    return max(0.0, estimate.mean - estimate.low), max(0.0, estimate.high - estimate.mean)
