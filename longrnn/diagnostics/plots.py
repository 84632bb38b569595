"""Plots of results."""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from longrnn.evaluation import forgetting, passkey, perplexity
from longrnn.files import write_atomic
from longrnn.results import Row
from longrnn.units import format_length

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def passkey_heat_map(rows: Sequence[Row], path: Path) -> None:
    """Plot accuracy by length (across) and depth (down), one panel per model.

    Args:
        rows: of `evaluation.passkey.evaluate`.
        path: the PNG to write.
    """
    runs = passkey.by_model(rows)
    width = max(len({row["length"] for row in one}) for one in runs.values())
    figure = new_figure(len(runs) * (0.8 * width + 1.2) + 1, 3.4)
    panels = figure.subplots(1, len(runs), squeeze=False)[0]
    image = None
    for panel, (name, one) in zip(panels, runs.items(), strict=True):
        cells = passkey.summarise(one)
        lengths = sorted({length for length, _ in cells})
        depths = sorted({depth for _, depth in cells if depth is not None})
        grid = [[cells[length, depth].mean for length in lengths] for depth in depths]
        image = panel.imshow(grid, vmin=0, vmax=1, cmap="RdYlGn", aspect="auto")
        for down, line in enumerate(grid):
            for across, value in enumerate(line):
                panel.text(across, down, f"{value:.2f}", ha="center", va="center", fontsize=9)
        panel.set_xticks(range(len(lengths)), [format_length(length) for length in lengths])
        panel.set_yticks(range(len(depths)), [f"{depth:.0%}" for depth in depths])
        panel.set(
            title=name.replace("+", "\n+"),
            xlabel="prompt length (tokens)",
            ylabel="depth of the key",
        )
    if image is not None:
        figure.colorbar(image, ax=list(panels), label="keys recalled")
    write_atomic(path, png(figure))


# Maximum number of cells with their values written into them.
WRITTEN = 200


def passkey_by_position(rows: Sequence[Row], path: Path) -> None:
    """Plot accuracy by distance since the key (across) and position of the key (down).

    There is one panel per model. The distance is counted from the key's line to the end of the
    prompt: length minus the filler before the key. Cells that were not evaluated are grey.

    Args:
        rows: of `evaluation.passkey.evaluate` with insertion points.
        path: the PNG to write.
    """
    runs = passkey.by_model(rows)
    cells = {name: passkey.summarise_inserted(one) for name, one in runs.items()}
    asked = {(t, place) for one in cells.values() for t, place in one if place is not None}
    places = sorted({place for _, place in asked})
    distances = sorted({t - place for t, place in asked})
    figure = new_figure(len(runs) * (0.5 * len(distances) + 1.4) + 1, 0.4 * len(places) + 2.2)
    panels = figure.subplots(1, len(runs), squeeze=False)[0]
    image = None
    for panel, (name, one) in zip(panels, cells.items(), strict=True):
        grid = [[math.nan] * len(distances) for _ in places]
        for t, place in asked:
            down, across = places.index(place), distances.index(t - place)
            grid[down][across] = value = one[t, place].mean
            if len(asked) <= WRITTEN:
                panel.text(across, down, f"{value:.2f}", ha="center", va="center", fontsize=7)
        panel.set_facecolor("lightgray")
        image = panel.imshow(grid, vmin=0, vmax=1, cmap="RdYlGn", aspect="auto")
        names = [format_length(distance) for distance in distances]
        panel.set_xticks(range(len(distances)), names, rotation=60 if len(distances) > 8 else 0)
        panel.set_yticks(range(len(places)), [format_length(place) for place in places])
        panel.set(
            title=name.replace("+", "\n+"),
            xlabel="distance since the key (tokens)",
            ylabel="filler before the key (tokens)",
        )
    if image is not None:
        figure.colorbar(image, ax=list(panels), label="keys recalled")
    write_atomic(path, png(figure))


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
        label = f"{forgetting.FACTOR:g} × the largest inside"
        panel.axhline(bound, color="tab:red", linestyle="--", linewidth=1, label=label)
        panel.axvline(train_length, color="gray", linestyle=":", linewidth=1.2, label="trained on")
    fine = perplexity.curve(rows, width)
    # A logarithmic axis cannot show position 0: positions are drawn as numbers of tokens read.
    middles = [start + width / 2 for start, _ in fine]
    label = f"stretches of {width}"
    panel.plot(
        middles, [y for _, y in fine], color="tab:blue", alpha=0.35, linewidth=1, label=label
    )
    centers = [(bucket.start + 1 + bucket.stop) / 2 for bucket in buckets]
    means = [bucket.nats.mean for bucket in buckets]
    panel.plot(centers, means, color="tab:blue", marker="o", markersize=4, label="buckets")
    if len(rows) > 1:
        low, high = [b.nats.low for b in buckets], [b.nats.high for b in buckets]
        panel.fill_between(centers, low, high, color="tab:blue", alpha=0.15, linewidth=0)
    lengths_axis(panel, rows[0]["length"])
    panel.set(xlabel="tokens read", ylabel="nats per token", ylim=(0, None))
    panel.legend(fontsize=8)
    write_atomic(path, png(figure))


def new_figure(width: float, height: float) -> Figure:
    """Return a figure of this size in inches that needs no display."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def lengths_axis(panel: Axes, length: int, least: int = 1) -> None:
    """Give a panel a logarithmic axis of token counts, labelled such as `4k`."""
    ticks = [4**k for k in range(40) if least <= 4**k <= length]
    panel.set_xscale("log", base=2)
    panel.set_xlim(least, max(length, least + 1))
    panel.set_xticks(ticks, [format_length(tick) for tick in ticks])
    panel.minorticks_off()


def png(figure: Figure) -> bytes:
    """Return a figure as the bytes of a PNG file."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=130)
    return buffer.getvalue()
