"""Loss by position on long texts, in bits per byte, on the same bytes for all models.

Notable choices:
- A window of length L reads L tokens from an empty state and predicts the token after each of them:
  the loss at position i is that of the token that follows the first i + 1 tokens. A text of n
  tokens has (n − 1) // L disjoint windows, each of which is one sample.
- Losses are summed piece by piece, so that neither logits nor losses of a whole window are in
  memory at once. A row has the sums between EDGES, so that further lengths need no measurement.
- Bits per byte is the loss of the scored tokens over the bytes of these tokens; for several windows
  it is the sum of their bits over the sum of their bytes. Models with different tokenizers score
  the same bytes: windows are cut at token borders of all of them.
- With `context` and `stride`, a window is scored in overlapping windows of a fixed context instead,
  each read from an empty state: the usual protocol for transformers.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from pydantic import PrivateAttr

from longrnn import processes
from longrnn.errors import UserError
from longrnn.evaluation.base import Column, Evaluation, Found, Item, Measurement
from longrnn.evaluation.forgetting import forgetting
from longrnn.evaluation.options import PerplexityOptions
from longrnn.evaluation.texts import newlines, read_documents
from longrnn.evaluation.windows import Window, cut_windows, grid, losses, powers
from longrnn.hf.opened import OpenCheckpoint
from longrnn.hf.training_length import training_length
from longrnn.inference.engine import out_of_reach
from longrnn.inference.overlapping import Overlap
from longrnn.intervals import FIGURE, MEAN, RATIO, Estimate, mean
from longrnn.progress import Progress
from longrnn.units import format_length

if TYPE_CHECKING:
    from longrnn.evaluation.base import Cell
    from longrnn.evaluation.report import Picture


class Perplexity(PerplexityOptions, Evaluation):
    """Loss by position, see `PerplexityOptions`."""

    kind: ClassVar[str] = "perplexity"

    _windows: dict[str, list[Window]] = PrivateAttr(default_factory=dict)

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
        self._windows = {model.name: [] for model in models}
        for texts in zip(*of_model, strict=True):
            cut = cut_windows(texts, self.lengths, self.windows, self._reach(models))
            for model, windows in zip(models, cut, strict=True):
                self._windows[model.name] += windows

    def _reach(self, models: Sequence[OpenCheckpoint]) -> list[float]:
        """Return how many tokens of a window each model can score."""
        most = [model.model.max_length or math.inf for model in models]
        return [math.inf if self.context is not None and self.context <= n else n for n in most]

    def _reason(self, model: OpenCheckpoint, length: int) -> str | None:
        return out_of_reach(model.model, min(length, self.context or length))

    def protocol(self, model: OpenCheckpoint) -> dict[str, Any]:
        return {} if self.overlap is None else self.overlap._asdict()

    def items(self, model: OpenCheckpoint) -> list[Item]:
        found = []
        for window in self._windows[model.name]:
            digest = window.document.sha256
            key = {"text": digest[:16], "start": window.start, "length": window.length}
            if further := sorted(set(window.edges) - set(grid(window.length))):
                key["edges"] = further
            found.append(Item(key, window, (digest, window.number), window.length))
        return found

    def measure(
        self, model: OpenCheckpoint, items: Sequence[Item], progress: Progress
    ) -> Iterator[Found]:
        most = processes.batch_size(len(items) * processes.size(), self.batch_size)
        shapes: dict[tuple[int, int], list[Item]] = {}
        for item in items:
            shapes.setdefault((item.spec.length, len(item.spec.edges)), []).append(item)
        for same in shapes.values():
            for first in range(0, len(same), most):
                batch = same[first : first + most]
                tokens = torch.stack([item.spec.tokens() for item in batch])
                edges = torch.tensor([item.spec.edges for item in batch])
                nats = losses(
                    model.model, tokens, edges, progress, self.overlap, rows=self.batch_size
                )
                yield [
                    (item, {"nats": [round(value, 6) for value in row]})
                    for item, row in zip(batch, nats.tolist(), strict=True)
                ]

    def columns(self, model: OpenCheckpoint, found: Found) -> list[Measurement]:
        measurements = []
        known = all(item.spec.document.byte_ends is not None for item, _ in found)
        unit, quantity = ("bits per byte", RATIO) if known else ("nats per token", MEAN)
        here = Column(f"{self.title}, {unit}", quantity, ".3f")
        whole = Column(f"{self.title}, {unit} from the start", quantity, ".3f", drawn=False)
        read = Column(f"{self.title}, tokens read per token", FIGURE, ".2f", drawn=False)
        for number, length in enumerate(self.lengths, 1):
            reached = [(i.spec, row["nats"]) for i, row in found if len(i.spec.cuts) > number]
            reason = None if reached else self._reason(model, length) or "not measured"
            for column, first in ((here, number - 1), (whole, 0)):
                samples = {
                    window.name: window.sample(nats, window.cuts[first], window.cuts[number])
                    for window, nats in reached
                }
                if column is here or len(self.lengths) > 1:
                    measurements.append(Measurement(column, length, samples, reason))
            if self.overlap is not None and reached:
                share = self.overlap.tokens_read(length) / length
                measurements.append(Measurement(read, length, {"": share}))
        return measurements

    def notes(self, model: OpenCheckpoint, found: Found) -> list[str]:
        if not found:
            return []
        rows = [(item.spec.edges, row["nats"]) for item, row in found]
        nats = mean([sum(values) / edges[-1] for edges, values in rows])
        notes = [
            f"{nats.show('.3f')} nats per token over {len(rows)} windows of "
            f"{format_length(rows[0][0][-1])} tokens, perplexity "
            f"{math.exp(min(nats.mean, 700)):,.2f}."
        ]
        trained = self.trained(model)
        if self.overlap is None and trained is not None:
            judged = forgetting(rows, trained)
            if judged is not None:
                notes.append(judged.sentence(trained, model.model.vocab_size))
        return notes

    def trained(self, model: OpenCheckpoint) -> int | None:
        """Return the training length of a model; None if it is not known."""
        if self.train_length is not None or not model.source:
            return self.train_length
        return training_length(model.source)

    def pictures(
        self, cells: Sequence[Cell], found: Mapping[str, Found], models: Sequence[OpenCheckpoint]
    ) -> list[Picture]:
        from longrnn.evaluation.figures import Line, lines, png
        from longrnn.evaluation.report import Picture, by_length, picture_name

        windows = [item.spec for own in found.values() for item, _ in own]
        if any(window.edges == window.cuts for window in windows):
            return by_length(self, cells)
        drawn = []
        for name, own in found.items():
            if own:
                buckets = by_bucket(own)
                middles = [(start + 1 + stop) / 2 for start, stop, _ in buckets]
                drawn.append(Line(name, middles, [estimate for *_, estimate in buckets]))
        marks = sorted({one for model in models if (one := self.trained(model)) is not None})
        figure = lines(
            drawn,
            across="tokens read",
            up="nats per token",
            ticks=[*(4**k for k in range(12) if 4**k < self.lengths[0]), *self.lengths],
            marks={mark: f"training length of {mark:,}" for mark in marks},
            limits=(0, None),
        )
        caption = "Loss by position, means over windows with 95 % intervals."
        return [Picture(picture_name(self.title, "by position"), caption, png(figure))]


def by_bucket(found: Found) -> list[tuple[int, int, Estimate]]:
    """Return the mean loss in nats per token between the powers of 2, with its interval.

    Args:
        found: results of windows of one length.
    """
    return [
        (a, b, mean([item.spec.sum(row["nats"], a, b) / (b - a) for item, row in found]))
        for a, b in pairwise(powers(found[0][0].spec.length))
    ]
