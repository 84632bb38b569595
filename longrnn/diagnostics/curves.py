"""The pictures of the reports on gradients and on training: one panel with curves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from longrnn.evaluation.figures import new_figure, png

# Maximum number of lines in a legend.
NAMED = 12
# A curve of fewer points has a marker at each: one point alone is an invisible line.
SPARSE = 20


def curves(
    drawn: Mapping[str, Sequence[tuple[float, float]]], *, across: str, up: str, log: bool = False
) -> bytes:
    """Return the PNG of curves given by their points.

    Args:
        drawn: points by label; curves without points are left out.
        across: title of the horizontal axis.
        up: title of the vertical axis.
        log: whether the vertical axis is logarithmic.
    """
    figure = new_figure(8.6, 3.8)
    panel = figure.subplots()
    for label, points in drawn.items():
        if points:
            marker = "o" if len(points) < SPARSE else None
            panel.plot(*zip(*points, strict=True), lw=1.2, marker=marker, ms=3, label=label)
    panel.set(xlabel=across, ylabel=up, yscale="log" if log else "linear")
    if 0 < len(panel.get_legend_handles_labels()[0]) <= NAMED:
        figure.legend(fontsize=8, loc="outside lower center", ncols=2, frameon=False)
    return png(figure)
