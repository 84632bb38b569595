"""Loss by position on long texts, in bits per byte, on the same bytes for all models.

Notable choices:
- A window of length L reads L tokens from an empty state and predicts the token after each of them:
  the loss at position i is that of the token that follows the first i + 1 tokens. A text of n
  tokens has (n − 1) // L disjoint windows, each of which is one sample.
- Losses are summed piece by piece, so that neither logits nor losses of a whole window are in
  memory at once. A row has the sums between powers of 2 and lengths: such lengths can be added
  without a measurement.
- Bits per byte is the loss of the scored tokens over the bytes of these tokens; for several windows
  it is the sum of their bits over the sum of their bytes. Models with different tokenizers score
  the same bytes: windows are cut at token borders of all of them.
- With `context` and `stride`, a window is scored in overlapping windows of a fixed context instead,
  each read from an empty state: the usual protocol for transformers.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby, pairwise, product
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from longrnn import processes
from longrnn.errors import UserError
from longrnn.evaluation.base import Column, Evaluation, Found, Item, Sample
from longrnn.evaluation.figures import Line, lines
from longrnn.evaluation.options import PerplexityOptions
from longrnn.evaluation.texts import newlines, read_documents
from longrnn.evaluation.windows import Window, cut_windows, losses, powers
from longrnn.hf.names import training_length
from longrnn.hf.opened import OpenCheckpoint
from longrnn.inference.overlapping import Overlap
from longrnn.intervals import RATIO, Estimate, mean
from longrnn.progress import Progress
from longrnn.results import Row
from longrnn.units import format_length

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class Perplexity(PerplexityOptions, Evaluation):
    """Loss by position, see `PerplexityOptions`."""

    kind: ClassVar[str] = "perplexity"

    def files(self) -> list[Path]:
        return list(self.texts)

    @property
    def overlap(self) -> Overlap | None:
        """The overlapping windows, if any."""
        if self.context is None or self.stride is None:
            return None
        return Overlap(self.context, self.stride)

    def prepare(self, models: Sequence[OpenCheckpoint]) -> None:
        if (self.context is None) != (self.stride is None):
            raise UserError("overlapping windows need both --context and --stride: give both")
        if self.overlap is not None:
            self.overlap.check()
        if not self.texts and not self.newlines:
            raise UserError("there is nothing to measure: give --text FILE, --newlines, or both")
        of_model = [read_documents(self.texts, model.tokenizer, model.model) for model in models]
        if self.newlines:
            for documents, model in zip(of_model, models, strict=True):
                documents.append(newlines(model.tokenizer, self.lengths[-1] + 1))
        self._items = {model.name: [] for model in models}
        for model, length in product(models, self.lengths):
            self.reaches(model, min(length, self.context or length), self._column(), length)
        # How many tokens of a window each model can score.
        most = [model.model.max_length or math.inf for model in models]
        reach = [math.inf if self.context and self.context <= limit else limit for limit in most]
        for texts in zip(*of_model, strict=True):
            cut = cut_windows(texts, self.lengths, self.windows, reach)
            for model, windows in zip(models, cut, strict=True):
                self._items[model.name] += map(_item, windows)

    def protocol(self, model: OpenCheckpoint) -> dict[str, Any]:
        return {} if self.overlap is None else self.overlap._asdict()

    def measure(
        self, model: OpenCheckpoint, items: Sequence[Item], progress: Progress
    ) -> Iterator[Found]:
        most = processes.batch_size(len(items) * processes.size(), self.batch_size)
        # With different tokenizers, windows of the same bytes have different lengths.
        for _, same in groupby(sorted(items, key=_shape), _shape):
            alike = list(same)
            for batch in (alike[first : first + most] for first in range(0, len(alike), most)):
                tokens = torch.stack([item.spec.tokens() for item in batch])
                edges = torch.tensor([item.spec.edges for item in batch])
                nats = losses(
                    model.model, tokens, edges, progress, self.overlap, rows=self.batch_size
                )
                yield [
                    (item, {"nats": [round(value, 6) for value in row]})
                    for item, row in zip(batch, nats.tolist(), strict=True)
                ]

    def samples(self, item: Item, row: Row) -> Iterator[Sample]:
        window: Window = item.spec
        known = window.document.byte_ends is not None
        here = self._column(known)
        whole = here._replace(name=f"{here.name} from the start", drawn=False)
        for length, (start, stop) in zip(self.lengths, pairwise(window.cuts), strict=False):
            yield Sample(here, length, window.name, window.sample(row["nats"], start, stop))
            if len(self.lengths) > 1:
                yield Sample(whole, length, window.name, window.sample(row["nats"], 0, stop))

    def _column(self, known: bool = True) -> Column:
        unit = "bits per byte" if known else "nats per token"
        return Column(f"{self.title}, {unit}", RATIO, ".3f")

    def notes(self, model: OpenCheckpoint, found: Found) -> list[str]:
        if not found:
            return []
        buckets, length = by_bucket(found), found[0][0].spec.length
        nats = mean([sum(row["nats"]) / item.spec.length for item, row in found])
        notes = [
            f"{nats.show('.3f')} nats per token over {len(found)} windows of "
            f"{format_length(length)} tokens, perplexity {math.exp(min(nats.mean, 700)):,.2f}."
        ]
        if self.overlap is not None:
            share = self.overlap.tokens_read(length) / length
            notes.append(f"The overlapping windows read {share:.2f} tokens per scored token.")
        trained = self.trained(model)
        inside = [value.mean for _, stop, value in buckets if stop <= (trained or 0)]
        beyond = [(value.mean, start) for start, _, value in buckets if start >= (trained or 0)]
        if inside and beyond and self.overlap is None:
            worst, start = max(beyond)
            notes.append(
                f"Beyond the training length of {trained:,} the loss reaches {worst:.3f} nats per "
                f"token (from position {start:,}), {worst / inside[-1]:.2f} × the loss at its end "
                f"({inside[-1]:.3f})."
            )
        return notes

    def trained(self, model: OpenCheckpoint) -> int | None:
        """Return the training length of a model; None if it is not known."""
        return self.train_length or (training_length(model.source) if model.source else None)

    def pictures(
        self, found: Mapping[str, Found], models: Sequence[OpenCheckpoint]
    ) -> Iterator[tuple[str, str, Figure]]:
        drawn = []
        for name, buckets in ((name, by_bucket(own)) for name, own in found.items()):
            middles = [(start + 1 + stop) / 2 for start, stop, _ in buckets]
            if buckets:
                drawn.append(Line(name, middles, [estimate for *_, estimate in buckets]))
        marks = sorted({one for model in models if (one := self.trained(model)) is not None})
        if drawn:
            ticks = [*(4**k for k in range(12) if 4**k < self.lengths[0]), *self.lengths]
            figure = lines(
                drawn,
                across="tokens read",
                up="nats per token",
                ticks=ticks,
                marks={mark: f"training length of {mark:,}" for mark in marks},
            )
            yield "by position", "Loss by position, means over windows.", figure


def _item(window: Window) -> Item:
    digest = window.document.sha256
    key = {"text": digest[:16], "start": window.start, "length": window.length}
    if further := sorted(set(window.edges) - set(powers(window.length))):
        key["edges"] = further
    return Item(key, window, (digest, window.number), window.length)


def _shape(item: Item) -> tuple[int, int]:
    return item.spec.length, len(item.spec.edges)


def by_bucket(found: Found) -> list[tuple[int, int, Estimate]]:
    """Return the mean loss in nats per token between the powers of 2, with its interval.

    Args:
        found: results of windows of one length; the list is empty if there are none, or they were
            cut for models with different tokenizers.
    """
    if not found or found[0][0].spec.edges == found[0][0].spec.cuts:
        return []
    return [
        (a, b, mean([item.spec.sum(row["nats"], a, b) / (b - a) for item, row in found]))
        for a, b in pairwise(powers(found[0][0].spec.length))
    ]
