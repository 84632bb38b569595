"""The loss by position of several models in one picture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from longrnn.diagnostics.plots import lengths_axis, new_figure, png
from longrnn.evaluation import perplexity
from longrnn.files import write_atomic
from longrnn.results import Row


def losses_by_position(
    rows: Mapping[str, Sequence[Row]], path: Path, train_length: int | None = None
) -> None:
    """Draws the mean loss of each bucket of positions, with its interval, one line per model.

    Args:
        rows: of `evaluation.perplexity.evaluate`, by the name of the model, all of one length.
        path: the PNG to write.
        train_length: tokens; where given, it is marked.
    """
    figure = new_figure(7.5, 4.2)
    panel = figure.subplots()
    if train_length is not None:
        panel.axvline(train_length, color="gray", linestyle=":", linewidth=1.2, label="trained on")
    length = 1
    for name, one in rows.items():
        length = one[0]["length"]
        _, buckets = perplexity.summarise(one)
        centers = [(bucket.start + 1 + bucket.stop) / 2 for bucket in buckets]
        line = panel.plot(
            centers, [b.nats.mean for b in buckets], marker="o", markersize=3, label=name
        )
        if len(one) > 1:
            low, high = [b.nats.low for b in buckets], [b.nats.high for b in buckets]
            panel.fill_between(
                centers, low, high, color=line[0].get_color(), alpha=0.15, linewidth=0
            )
    lengths_axis(panel, length)
    panel.set(xlabel="tokens read", ylabel="nats per token", ylim=(0, None))
    panel.legend(fontsize=8)
    write_atomic(path, png(figure))
