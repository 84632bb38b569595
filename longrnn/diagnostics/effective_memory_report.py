"""Writes the report of effective remembrance."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from longrnn.diagnostics.pages import Picture, write_page
from longrnn.diagnostics.plots import lengths_axis, new_figure, png
from longrnn.evaluation.memory import ENOUGH, MeanEffRem, enough
from longrnn.units import format_length

CAPTIONS = {
    "effrem_by_start": "EffRem by the number of first tokens that are left out, one line for each "
    "length of the context. Near 1 at the left, the prediction depends on the first tokens.",
    "effrem_by_kept": "The same by the number of last tokens that are kept. The number from which "
    f"a line stays below {ENOUGH:g} (dashed) is enough.",
}


def write_report(
    found: Mapping[int, Sequence[MeanEffRem]], about: Mapping[str, Any], folder: Path
) -> list[Path]:
    """Write the pictures and `report.html`.

    Args:
        found: of `evaluation.memory.summarise`.
        about: `checkpoint`, `fingerprint`, `mitigation`, and `texts` as (name, SHA-256).
        folder: of the results.

    Returns:
        The files, the report first.
    """
    values = {
        "about": about,
        "summary": summary(found),
        "found": found,
        "length": format_length,
        "n": next(iter(found.values()))[0].effrem.n,
    }
    pictures = [_picture(found, name) for name in CAPTIONS]
    return write_page("memory.html", folder, pictures, values)


def summary(found: Mapping[int, Sequence[MeanEffRem]]) -> str:
    """Describe in two sentences what the prediction after the longest context depends on."""
    position = max(found)
    points = found[position]
    first = next(point for point in reversed(points) if point.start <= max(1, position // 64))
    shortest = enough(points, position)
    whole = format_length(position)
    effect = (
        f"After {whole} tokens the prediction changes by {first.effrem.mean:.3f} (of at most 1) "
        f"if the first {format_length(first.start)} are left out."
    )
    if shortest is None:
        return f"{effect} No shorter context predicts within {ENOUGH:g} of the whole one."
    return (
        f"{effect} The last {shortest:,} tokens predict within {ENOUGH:g} of the whole "
        "context, and so does every longer context that was measured."
    )


def _picture(found: Mapping[int, Sequence[MeanEffRem]], name: str) -> Picture:
    from matplotlib import colormaps

    figure = new_figure(7.5, 4.2)
    panel = figure.subplots()
    for index, (position, points) in enumerate(found.items()):
        colour = colormaps["viridis"](0.9 * index / max(1, len(found) - 1))
        by_start = name == "effrem_by_start"
        across = [point.start if by_start else position - point.start for point in points]
        means = [point.effrem.mean for point in points]
        label = f"T = {format_length(position)}"
        panel.plot(across, means, color=colour, marker="o", markersize=3, lw=1.2, label=label)
        if points[0].effrem.n > 1:
            low, high = [p.effrem.low for p in points], [p.effrem.high for p in points]
            panel.fill_between(across, low, high, color=colour, alpha=0.15, linewidth=0)
    if name == "effrem_by_kept":
        panel.axhline(ENOUGH, color="gray", linestyle="--", linewidth=1)
    lengths_axis(panel, max(found))
    left_out = "first tokens left out" if name == "effrem_by_start" else "last tokens kept"
    panel.set(xlabel=left_out, ylabel="EffRem (total variation)", ylim=(-0.02, 1.02))
    panel.legend(fontsize=8)
    return Picture(name, CAPTIONS[name], png(figure))
