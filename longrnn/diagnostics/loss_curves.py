"""The loss by position of several models in one picture."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from itertools import cycle, product
from pathlib import Path

from longrnn.diagnostics.plots import lengths_axis, new_figure, png
from longrnn.evaluation import perplexity
from longrnn.files import write_atomic
from longrnn.results import Row

# Ten colours, then the same with other dashes, so that twenty and more lines differ.
COLOURS = [f"C{k}" for k in range(10)]
DASHES = ("-", "--", ":", "-.")
# Characters of one line of the legend.
LEGEND_WIDTH = 80


def losses_by_position(
    rows: Mapping[str, Sequence[Row]],
    path: Path,
    train_length: int | Sequence[int | None] | None = None,
) -> None:
    """Draws the mean loss of each bucket of positions, with its interval, one line per model.

    The legend stands below the picture, because names of models under mitigations are long.

    Args:
        rows: of `evaluation.perplexity.evaluate`, by the name of the model, all of one length.
        path: the PNG to write.
        train_length: in tokens, of all models or of each; where given, it is marked.
    """
    labels = {name: textwrap.fill(name, LEGEND_WIDTH, subsequent_indent="  ") for name in rows}
    given = train_length if isinstance(train_length, Sequence) else [train_length]
    marks = sorted({one for one in given if one is not None})
    lines = len(marks) + sum(label.count("\n") + 1 for label in labels.values())
    figure = new_figure(7.5, 4.2 + 0.17 * lines)
    panel = figure.subplots()
    for mark in marks:
        label = f"training length of {mark:,}"
        panel.axvline(mark, color="gray", linestyle=":", linewidth=1.2, label=label)
    length = 1
    styles = cycle(product(DASHES, COLOURS))
    for number, ((name, one), (dash, colour)) in enumerate(zip(rows.items(), styles, strict=False)):
        length = one[0]["length"]
        _, buckets = perplexity.summarise(one)
        centers = [(bucket.start + 1 + bucket.stop) / 2 for bucket in buckets]
        means = [bucket.nats.mean for bucket in buckets]
        # The first lines are the widest, so that one under another is still seen.
        wide = 1.2 + 2.4 * (len(rows) - 1 - number) / max(1, len(rows) - 1)
        style = {"color": colour, "linestyle": dash, "marker": "o", "markersize": 2 + wide}
        panel.plot(centers, means, **style, linewidth=wide, label=labels[name])
        if len(one) > 1:
            low, high = [b.nats.low for b in buckets], [b.nats.high for b in buckets]
            panel.fill_between(centers, low, high, color=colour, alpha=0.15, linewidth=0)
    lengths_axis(panel, length)
    panel.set(xlabel="tokens read", ylabel="nats per token", ylim=(0, None))
    figure.legend(loc="outside lower left", fontsize=8, frameon=False)
    write_atomic(path, png(figure))
