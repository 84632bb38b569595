"""Plots of results."""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING, Any

from longrnn.evaluation import forgetting, passkey, perplexity
from longrnn.files import write_atomic
from longrnn.results import Row
from longrnn.units import format_length

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


# Inches of a cell, and of the panels in one row, so that a page 800 pixels wide shows the figures.
CELL, ROW = 0.5, 9.0
# Maximum number of cells with their values written into them.
WRITTEN = 200
Cells = Mapping[tuple[int, float], float]


def passkey_heat_map(rows: Sequence[Row], path: Path) -> None:
    """Plot accuracy by length (across) and depth (down), one panel per model.

    Args:
        rows: of `evaluation.passkey.evaluate`.
        path: the PNG to write.
    """
    cells: dict[str, Cells] = {}
    for name, one in passkey.by_model(rows).items():
        found = passkey.summarise(one).items()
        cells[name] = {(t, depth): cell.mean for (t, depth), cell in found if depth is not None}
    figure = _heat_maps(cells, "{:.0%}".format)
    figure.supxlabel("prompt length (tokens)", fontsize=10)
    figure.supylabel("depth of the key", fontsize=10)
    write_atomic(path, png(figure))


def passkey_by_position(rows: Sequence[Row], path: Path) -> None:
    """Plot accuracy by distance since the key (across) and position of the key (down).

    There is one panel per model. The distance is counted from the key's line to the end of the
    prompt: length minus the filler before the key.

    Args:
        rows: of `evaluation.passkey.evaluate` with insertion points.
        path: the PNG to write.
    """
    cells: dict[str, Cells] = {}
    for name, one in passkey.by_model(rows).items():
        found = passkey.summarise_inserted(one).items()
        cells[name] = {(t - at, at): cell.mean for (t, at), cell in found if at is not None}
    figure = _heat_maps(cells, format_length)
    figure.supxlabel("distance since the key (tokens)", fontsize=10)
    figure.supylabel("filler before the key (tokens)", fontsize=10)
    write_atomic(path, png(figure))


def _heat_maps(models: Mapping[str, Cells], down_label: Callable[[Any], str]) -> Figure:
    """Return one panel per model with its cells by (across, down); missing cells are grey."""
    keys = {key for cells in models.values() for key in cells}
    across, down = sorted({x for x, _ in keys}), sorted({y for _, y in keys})
    width, height = max(2.2, CELL * len(across)), max(1.6, 0.8 * CELL * len(down))
    columns = min(len(models), max(1, int(ROW / width)))
    lines = -(-len(models) // columns)
    figure = new_figure(columns * (width + 0.2) + 1.6, lines * (height + 0.7) + 0.5)
    panels = figure.subplots(lines, columns, squeeze=False, sharey=True)
    for panel in panels.flat[len(models) :]:
        panel.remove()
    used = list(panels.flat[: len(models)])
    names = [format_length(value) for value in across]
    for panel, (model, cells) in zip(used, models.items(), strict=True):
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
        parts = model.replace("+", "\n+").splitlines()
        panel.set_title("\n".join(fill(part, int(14 * width)) for part in parts), fontsize=9)
    figure.colorbar(used[0].images[0], ax=used, label="keys recalled")
    return figure


def loss_by_position(rows: Sequence[Row], path: Path, train_length: int | None) -> None:
    """Plot the mean loss by position: buckets with their intervals, and the finer stretches.

    Args:
        rows: of `evaluation.perplexity.evaluate`, all of one length.
        path: the PNG to write.
        train_length: if given, it is marked, with the bound of robust forgetting.
    """
    _, buckets = perplexity.summarise(rows)
    figure = new_figure(7.5, 4.2)
    panel = figure.subplots()
    width = perplexity.STRETCH
    if train_length is not None and (found := forgetting.forgetting(rows, train_length)):
        width = found.width
        bound = forgetting.FACTOR * found.inside
        label = f"{forgetting.FACTOR:g} × the largest loss inside the training length"
        panel.axhline(bound, color="tab:red", linestyle="--", linewidth=1, label=label)
        panel.axvline(
            train_length, color="gray", linestyle=":", linewidth=1.2, label="training length"
        )
    fine = perplexity.curve(rows, width)
    # A logarithmic axis cannot show position 0: positions are drawn as numbers of tokens read.
    middles = [start + width / 2 for start, _ in fine]
    label = f"means over {width} tokens"
    panel.plot(
        middles, [y for _, y in fine], color="tab:blue", alpha=0.35, linewidth=1, label=label
    )
    centers = [(bucket.start + 1 + bucket.stop) / 2 for bucket in buckets]
    means = [bucket.nats.mean for bucket in buckets]
    panel.plot(
        centers, means, color="tab:blue", marker="o", markersize=4, label="means over buckets"
    )
    if len(rows) > 1:
        low, high = [b.nats.low for b in buckets], [b.nats.high for b in buckets]
        panel.fill_between(centers, low, high, color="tab:blue", alpha=0.15, linewidth=0)
    lengths_axis(panel, rows[0]["length"])
    panel.set(xlabel="tokens read", ylabel="nats per token", ylim=(0, None))
    panel.legend(fontsize=8)
    write_atomic(path, png(figure))


# Smallest distance of two ticks whose labels do not overlap, as a share of the axis.
NEAR = 0.05


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
