"""The pictures of all diagnoses and of training: panels above each other with the same curves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from textwrap import fill
from typing import TYPE_CHECKING, NamedTuple

from longrnn.evaluation.figures import PER_INCH, STYLES, lengths_axis, new_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# A curve of fewer points has a marker at each: one point alone is an invisible line.
SPARSE = 20


class Panel(NamedTuple):
    """One panel.

    Attributes:
        up: title of the vertical axis.
        drawn: positions and values by label, the same label for the same thing in every panel.
            Those whose label begins with an underscore are thin, grey and not in the legend.
        log: whether the vertical axis is logarithmic.
        level: height of a dashed line.
    """

    up: str
    drawn: Mapping[str, tuple[Sequence[float], Sequence[float]]]
    log: bool = False
    level: float | None = None


def curves(panels: Sequence[Panel], *, across: str, trained: int | None = None) -> Figure:
    """Draw panels, whose horizontal axis is one of whole numbers.

    Args:
        panels: from top to bottom.
        across: title of the horizontal axis.
        trained: the training length, drawn as a dotted line; the axis then is one of token counts.
    """
    shown = dict.fromkeys(label for panel in panels for label in panel.drawn if label[0] != "_")
    labels = {label: place for place, label in enumerate(shown)}
    figure = new_figure(8.0, 1.2 + 2.1 * len(panels) + 0.1 * len(labels))
    rows = figure.subplots(len(panels), squeeze=False, sharex=True)[:, 0]
    legend = {}
    for axes, panel in zip(rows, panels, strict=True):
        for label, (at, values) in panel.drawn.items():
            marker = "o" if len(at) < SPARSE else None
            (line,) = axes.plot(at, values, color="0.6", lw=0.7, marker=marker, ms=3)
            if label in labels:
                place = labels[label]
                line.set(color=f"C{place % 10}", linestyle=STYLES[place // 10 % 4], lw=1.4)
                legend[label] = line
        if panel.level is not None:
            axes.axhline(panel.level, color="gray", linestyle="--", lw=1)
        if trained is not None:
            at, _ = next(iter(panel.drawn.values()))
            lengths_axis(axes, int(at[-1]), int(at[0]))
            axes.axvline(trained, color="black", linestyle=":", lw=1.2)
        axes.set_ylabel(panel.up, fontsize=9)
        axes.set_yscale("log" if panel.log else "linear")
    if trained is None:
        rows[-1].locator_params(axis="x", integer=True)
    rows[-1].set_xlabel(across)
    figure.align_ylabels(list(rows))
    places = {"loc": "outside lower center", "ncols": 2, "fontsize": 8, "frameon": False}
    # In two columns.
    names = [fill(label, int(PER_INCH * 3.5)) for label in legend]
    figure.legend(legend.values(), names, **places)
    return figure
