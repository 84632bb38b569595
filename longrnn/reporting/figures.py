"""All figures: lines with their intervals, heat maps, and panels above each other.

Notable choices:
- Names of models and runs are text, never mathematics between dollar signs.
- The settings are those that matplotlib ships; a `matplotlibrc` of the user or of the current
  folder is not used.
"""

from __future__ import annotations

import io
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from textwrap import fill
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple
from warnings import catch_warnings, filterwarnings

import numpy as np

from longrnn.errors import UserError
from longrnn.files import one_line
from longrnn.intervals import Estimate
from longrnn.units import format_length

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Inches of a cell.
CELL = 0.5
# A ratio of largest to smallest value above this gets a logarithmic axis.
LOG_RATIO = 30
STYLES = ("-", "--", ":", "-.")
# More lengths than this have slanted labels.
UPRIGHT = 10
# Characters of a name per inch; longer names are broken into lines.
PER_INCH = 14
# A curve of fewer points has a marker at each: a single point is an invisible line.
SPARSE = 20

LEGEND: dict[str, Any] = {"fontsize": 8, "frameon": False}

# Positions and values by label.
Curves = Mapping[str, tuple[Sequence[float], Sequence[float]]]


class Panel(NamedTuple):
    """One panel.

    Attributes:
        up: title of the vertical axis.
        drawn: positions and values by label: none, or those of every panel in the same order.
        log: whether the vertical axis is logarithmic.
        level: height of a dashed line.
        grey: thin curves that are not in the legend, below the others.
    """

    up: str
    drawn: Curves
    log: bool = False
    level: float | None = None
    grey: Curves = MappingProxyType({})


@contextmanager
def default_settings() -> Iterator[None]:
    """Draw with the settings of matplotlib itself within this context.

    Raises:
        UserError: the environment is such that matplotlib cannot be imported.
    """
    try:
        # The font manager needs a cache.
        from matplotlib import font_manager, rc_context, rcdefaults, rcParams  # noqa: F401
        from matplotlib.rcsetup import cycler
    except (OSError, ValueError) as error:
        raise UserError(
            f"pictures cannot be drawn ({one_line(error)}): set MPLBACKEND=agg, and MPLCONFIGDIR "
            "to a folder that can be written"
        ) from error

    with rc_context(), catch_warnings():
        rcdefaults()
        # Ten colours, then the same with other dashes.
        rcParams["axes.prop_cycle"] = cycler(linestyle=STYLES) * rcParams["axes.prop_cycle"]
        # Characters of a name in a script that the font lacks are drawn as boxes.
        filterwarnings("ignore", "Glyph")
        yield


@default_settings()
def lines(drawn: Mapping[str, Mapping[int, Estimate]], *, across: str, up: str) -> Figure:
    """Draw lines over a logarithmic axis of tokens, with their 95 % intervals.

    The legend stands below the picture, because names of models under mitigations are long.

    Args:
        drawn: values by tokens and by label; at least one.
        across: title of the axis of tokens.
        up: title of the other axis.
    """
    labels = [fill(name, int(PER_INCH * 7)) for name in drawn]
    figure = new_figure(7.5, 4.2 + 0.17 * len("\n".join(labels).splitlines()))
    panel = figure.subplots()
    # The first lines are wide, so that a line under another is still seen.
    for cells, width in zip(drawn.values(), np.linspace(3, 1, len(drawn)), strict=True):
        means, low, high = np.array([value[:3] for value in cells.values()], float).T
        bars = np.array([means - low, high - means]).clip(min=0)
        bars[~np.isfinite(bars)] = math.nan  # not drawn
        bar = panel.errorbar([*cells], means, bars, elinewidth=1, capsize=3)
        bar.lines[0].set(marker="o", alpha=0.8, linewidth=width)
    places = {place for cells in drawn.values() for place in cells}
    lengths_axis(panel, max(places), measured=places)
    values = [value.mean for cells in drawn.values() for value in cells.values()]
    if min(values) > 0 and max(values) > LOG_RATIO * min(values):
        panel.set_yscale("log")
    elif min(values) >= 0:
        top = 1.04 * panel.get_ylim()[1] if max(values) > 0 else 1.0
        panel.set_ylim(-0.02 * top, top)
    panel.set(xlabel=across, ylabel=up)
    handles: Any = panel.containers
    figure.legend(handles, labels, loc="outside lower left", **LEGEND)
    return figure


@default_settings()
def heat_maps(
    models: Mapping[str, Mapping[tuple[int, str], float]], across: str, meaning: str
) -> Figure:
    """Draw one panel per model with its cells by length and name; missing cells are grey.

    Args:
        models: values from 0 to 1 by tokens (across) and name (down).
        across: title of the axis of tokens.
        meaning: title of the colours.
    """
    from matplotlib import colormaps

    keys = [key for cells in models.values() for key in cells]
    lengths, names = sorted({at for at, _ in keys}), list(dict.fromkeys(name for _, name in keys))
    width, height = max(4.0, CELL * len(lengths)), max(1.2, 0.8 * CELL * len(names)) + 0.7
    figure = new_figure(width + 1.8, len(models) * height + 0.5)
    panels = list(figure.subplots(len(models), squeeze=False).flat)
    colours = colormaps["RdYlGn"].with_extremes(bad="gray")
    for panel, (model, cells) in zip(panels, models.items(), strict=True):
        grid = [[cells.get((at, name), math.nan) for at in lengths] for name in names]
        # Pale colours, on which black can be read.
        panel.imshow(grid, vmin=0, vmax=1, cmap=colours, aspect="auto", alpha=0.6)
        for (at, name), value in cells.items():
            place = lengths.index(at), names.index(name)
            panel.text(*place, f"{value:.2f}", ha="center", va="center", fontsize=9)
        panel.set_xticks(range(len(lengths)), map(format_length, lengths))
        panel.set_yticks(range(len(names)), names)
        panel.set_title(fill(model, int(PER_INCH * width)), fontsize=8)
    figure.colorbar(panels[0].images[0], ax=panels, label=meaning)
    figure.supxlabel(across, fontsize=10)
    return figure


@default_settings()
def curves(panels: Sequence[Panel], *, across: str, trained: int | None = None) -> Figure:
    """Draw panels, whose horizontal axis has whole numbers.

    Args:
        panels: from top to bottom.
        across: title of the horizontal axis.
        trained: the training length, drawn as a dotted line; the axis then has token counts.
    """
    most = max(len(panel.drawn) for panel in panels)
    figure = new_figure(8.0, 1.2 + 2.1 * len(panels) + 0.1 * most)
    rows = figure.subplots(len(panels), squeeze=False, sharex=True)[:, 0]
    handles: dict[str, Any] = {}
    for axes, panel in zip(rows, panels, strict=True):
        for at, values in panel.grey.values():
            axes.plot(at, values, color="0.6", ls="-", lw=0.7, marker=_marker(at), ms=3)
        for label, (at, values) in panel.drawn.items():
            (handles[label],) = axes.plot(at, values, lw=1.4, marker=_marker(at), ms=3)
        every = [*panel.grey.values(), *panel.drawn.values()]
        if panel.level is not None:
            axes.axhline(panel.level, color="gray", linestyle="--", lw=1)
        elif not panel.log and {value for _, values in every for value in values} == {0}:
            axes.set_ylim(-0.02, 1)  # otherwise a tiny range around 0
        if trained is not None:
            at, _ = every[0]
            lengths_axis(axes, int(at[-1]), int(at[0]))
            axes.axvline(trained, color="black", linestyle=":", lw=1.2)
        axes.set_ylabel(panel.up, fontsize=9)
        axes.set_yscale("log" if panel.log else "linear")
    if trained is None:
        rows[-1].locator_params(axis="x", integer=True)
    rows[-1].set_xlabel(across)
    figure.align_ylabels(list(rows))
    # In two columns.
    names = [fill(label, int(PER_INCH * 3.5)) for label in handles]
    figure.legend([*handles.values()], names, loc="outside lower center", ncols=2, **LEGEND)
    return figure


def _marker(at: Sequence[float]) -> str | None:
    return "o" if len(at) < SPARSE else None


def new_figure(width: float, height: float) -> Figure:
    """Return a figure of this size in inches that needs no display."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def lengths_axis(panel: Axes, length: int, least: int = 1, measured: Collection[int] = ()) -> None:
    """Give a panel a logarithmic axis of token counts, with labels such as `4k`.

    Labels are at the measured lengths if they are given, else at powers of 4.
    """
    ticks = sorted(measured) or [4**k for k in range(32) if least <= 4**k <= length]
    panel.set_xscale("log", base=2)
    names = [format_length(tick) for tick in ticks]
    panel.set_xticks(ticks, names, rotation=45 * (len(ticks) > UPRIGHT))
    panel.minorticks_off()


@default_settings()
def png(figure: Figure) -> bytes:
    """Return a figure as the bytes of a PNG file."""
    for axes in figure.axes:
        for text in (axes.title, axes.xaxis.label, axes.yaxis.label):
            text.set_parse_math(False)
    for legend in figure.legends:
        for text in legend.get_texts():
            text.set_parse_math(False)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=130)
    return buffer.getvalue()
