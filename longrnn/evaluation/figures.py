"""The figures of all reports: lines with their intervals, and heat maps."""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from textwrap import fill
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from longrnn.intervals import Estimate
from longrnn.units import format_length

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Inches of a cell.
CELL = 0.5
# Maximum number of cells with their values written into them.
WRITTEN = 200
# Characters of one line of the legend.
LEGEND_WIDTH = 80
# A ratio of largest to smallest value above this gets a logarithmic axis.
WIDE = 30
# Smallest distance of two ticks whose labels do not overlap, as a share of the axis.
NEAR = 0.05


class Line(NamedTuple):
    """A line of a figure: its label, positions, and values with their intervals."""

    label: str
    at: Sequence[float]
    values: Sequence[Estimate]


def lines(
    drawn: Sequence[Line],
    *,
    across: str,
    up: str,
    ticks: Collection[int] = (),
    marks: Mapping[int, str] | None = None,
) -> Figure:
    """Draw lines over a logarithmic axis of tokens, with their 95 % intervals.

    The legend stands below the picture, because names of models under mitigations are long.

    Args:
        drawn: at least one line.
        across: title of the axis of tokens.
        up: title of the other axis.
        ticks: positions with a label; by default powers of 4.
        marks: labels of vertical lines, by position.
    """
    from cycler import cycler
    from matplotlib import color_sequences

    labels = [fill(line.label, LEGEND_WIDTH, subsequent_indent="  ") for line in drawn]
    rows = sum(label.count("\n") + 1 for label in labels) + len(marks or ())
    figure = new_figure(7.5, 4.2 + 0.17 * rows)
    panel = figure.subplots()
    for place, label in (marks or {}).items():
        panel.axvline(place, color="gray", linestyle=":", linewidth=1.2, label=label)
    # Ten colours, then the same with other dashes, so that forty lines differ.
    panel.set_prop_cycle(
        cycler(linestyle=["-", "--", ":", "-."]) * cycler(color=color_sequences["tab10"])
    )
    # The first lines are wide, so that one under another is still seen.
    for line, label, width in zip(drawn, labels, np.linspace(3, 1, len(drawn)), strict=True):
        means, low, high = np.array([value[:3] for value in line.values], float).T
        bars = np.array([means - low, high - means]).clip(min=0)
        bars[~np.isfinite(bars)] = math.nan  # not drawn
        style = {"marker": "o", "linewidth": width, "alpha": 0.8, "elinewidth": 1, "capsize": 3}
        panel.errorbar(line.at, means, yerr=bars, label=label, **style)
    places = [place for line in drawn for place in line.at]
    values = [value.mean for line in drawn for value in line.values]
    least = max(1, math.floor(min(places) / 1.2))
    lengths_axis(panel, max(math.ceil(max(places) * 1.1), *ticks, 0), least, ticks)
    if min(values) > 0 and max(values) > WIDE * min(values):
        panel.set_yscale("log")
    elif min(values) >= 0:
        panel.set_ylim(bottom=-0.02 * max(values), top=None if max(values) else 1)
    panel.set(xlabel=across, ylabel=fill(up, 50))
    figure.legend(loc="outside lower left", fontsize=8, frameon=False)
    return figure


def heat_maps(
    models: Mapping[str, Mapping[tuple[float, float], float]],
    axes: tuple[str, str],
    down_label: Callable[[Any], str],
    meaning: str,
) -> Figure:
    """Draw one panel per model with its cells by (across, down); missing ones are grey.

    Args:
        models: values from 0 to 1 by tokens (across) and any number (down).
        axes: titles of both axes.
        down_label: writes a number of the second axis.
        meaning: title of the colours.
    """
    keys = {key for cells in models.values() for key in cells}
    across, down = sorted({x for x, _ in keys}), sorted({y for _, y in keys})
    width, height = max(4.0, CELL * len(across)), max(1.2, 0.8 * CELL * len(down)) + 0.7
    figure = new_figure(width + 1.8, len(models) * height + 0.5)
    panels = list(figure.subplots(len(models), squeeze=False).flat)
    names = [format_length(int(value)) for value in across]
    for panel, (model, cells) in zip(panels, models.items(), strict=True):
        grid = [[cells.get((x, y), math.nan) for x in across] for y in down]
        panel.set_facecolor("lightgray")
        image = panel.imshow(grid, vmin=0, vmax=1, cmap="RdYlGn", aspect="auto")
        for (x, y), value in cells.items() if len(keys) <= WRITTEN else ():
            red, green, blue, _ = image.cmap(value)
            light = 0.299 * red + 0.587 * green + 0.114 * blue > 0.5
            place = {"ha": "center", "va": "center", "color": "black" if light else "white"}
            panel.text(across.index(x), down.index(y), f"{value:.2f}", fontsize=9, **place)
        panel.set_xticks(range(len(across)), names, rotation=60 if len(across) > 8 else 0)
        panel.set_yticks(range(len(down)), [down_label(value) for value in down])
        panel.set_title(fill(model, int(14 * width)), fontsize=9)
    figure.colorbar(panels[0].images[0], ax=panels, label=meaning)
    figure.supxlabel(axes[0], fontsize=10)
    figure.supylabel(axes[1], fontsize=10)
    return figure


def new_figure(width: float, height: float) -> Figure:
    """Return a figure of this size in inches that needs no display."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def lengths_axis(panel: Axes, length: int, least: int = 1, measured: Collection[int] = ()) -> None:
    """Give a panel a logarithmic axis of token counts, labelled such as `4k`.

    Ticks are the measured lengths if they are given, else powers of 4 and the end of the axis;
    without those that are too near to the one before for their labels.
    """
    candidates = sorted({*measured} or {*(4**k for k in range(40) if least <= 4**k), length})
    ticks: list[int] = []
    for tick in candidates:
        if tick <= length and (not ticks or tick >= ticks[-1] * (length / least) ** NEAR):
            ticks.append(tick)
    panel.set_xscale("log", base=2)
    panel.set_xlim(least, max(length, least + 1))
    panel.set_xticks(ticks, [format_length(tick) for tick in ticks])
    panel.minorticks_off()


def png(figure: Figure) -> bytes:
    """Return a figure as the bytes of a PNG file."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=130)
    return buffer.getvalue()
