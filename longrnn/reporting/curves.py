"""The figures of all diagnoses and of training: panels above each other with the same curves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from textwrap import fill
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

from longrnn.reporting.figures import (
    PER_INCH,
    STYLES,
    add_legend,
    default_settings,
    lengths_axis,
    new_figure,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# A curve of fewer points has a marker at each: a single point is an invisible line.
SPARSE = 20


Curves = Mapping[str, tuple[Sequence[float], Sequence[float]]]


class Panel(NamedTuple):
    """One panel.

    Attributes:
        up: title of the vertical axis.
        drawn: positions and values by label, the same label for the same thing in every panel.
        log: whether the vertical axis is logarithmic.
        level: height of a dashed line.
        grey: thin curves that are not in the legend, below the others.
    """

    up: str
    drawn: Curves
    log: bool = False
    level: float | None = None
    grey: Curves = MappingProxyType({})


@default_settings()
def curves(panels: Sequence[Panel], *, across: str, trained: int | None = None) -> Figure:
    """Draw panels, whose horizontal axis has whole numbers.

    Args:
        panels: from top to bottom.
        across: title of the horizontal axis.
        trained: the training length, drawn as a dotted line; the axis then has token counts.
    """
    labels = list(dict.fromkeys(label for panel in panels for label in panel.drawn))
    figure = new_figure(8.0, 1.2 + 2.1 * len(panels) + 0.1 * len(labels))
    rows = figure.subplots(len(panels), squeeze=False, sharex=True)[:, 0]
    handles: dict[str, Any] = {}
    for axes, panel in zip(rows, panels, strict=True):
        for at, values in panel.grey.values():
            axes.plot(at, values, color="0.6", lw=0.7, marker=_marker(at), ms=3)
        for label, (at, values) in panel.drawn.items():
            place = labels.index(label)
            style = {"color": f"C{place % 10}", "linestyle": STYLES[place // 10 % len(STYLES)]}
            (handles[label],) = axes.plot(at, values, lw=1.4, marker=_marker(at), ms=3, **style)
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
    add_legend(figure, [*handles.values()], names, loc="outside lower center", ncols=2)
    return figure


def _marker(at: Sequence[float]) -> str | None:
    return "o" if len(at) < SPARSE else None
