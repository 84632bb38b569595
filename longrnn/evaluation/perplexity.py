"""Loss by position on long texts, in bits per byte, on the same bytes for all models.

Notable choices:
- A window of length L reads L tokens from an empty state and predicts the token after each of them:
  the loss at position i is that of the token that follows the first i + 1 tokens. A text of n
  tokens has (n − 1) // L disjoint windows, each of which is one sample.
- A row has the sums of losses between powers of 2 and lengths: such lengths can be added without a
  measurement.
- Bits per byte is the loss of the scored tokens over the bytes of these tokens; for several windows
  it is the sum of their bits over the sum of their bytes. Models with different tokenizers score
  the same bytes: windows are cut at token borders of all of them.
- With `context` and `stride`, a window is scored in overlapping windows of a fixed context instead,
  each read from an empty state: the usual protocol for transformers.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any, ClassVar

import torch

from longrnn.errors import UserError
from longrnn.evaluation.base import Column, Evaluation, Found, Item, Plan, Sample, batches, within
from longrnn.evaluation.options import PerplexityOptions
from longrnn.evaluation.texts import Window, are_alike, cut_windows, newlines, read_documents
from longrnn.hf.opened import OpenCheckpoint
from longrnn.inference.overlapping import Overlap, overlapping_losses
from longrnn.intervals import RATIO
from longrnn.progress import Progress
from longrnn.results import Row

# The first power of 2 that divides windows.
FIRST = 16


class Perplexity(PerplexityOptions, Evaluation):
    """Loss by position, see `PerplexityOptions`."""

    kind: ClassVar[str] = "perplexity"

    def plan(self, models: Sequence[OpenCheckpoint]) -> list[Plan]:
        if (self.context is None) != (self.stride is None):
            raise UserError("overlapping windows need both --context and --stride: give both")
        Overlap(self.context or 1, self.stride or 1).check()
        if not self.texts and not self.newlines:
            raise UserError("there is nothing to measure: give --text FILE, --newlines, or both")
        longest = self.lengths[-1]
        of_model = [read_documents(self.texts, model.tokenizer, model.model) for model in models]
        for documents, model in zip(of_model, models, strict=True):
            documents += [newlines(model.tokenizer, longest + 1)] if self.newlines else []
            if documents[0].byte_ends is None:
                raise UserError(
                    f"the tokenizer of {model.name} does not know which bytes a token stands for: "
                    "use the fast tokenizer of the checkpoint, which has a tokenizer.json"
                )
        every, positions = list(zip(*of_model, strict=True)), set(self.lengths)
        if all(map(are_alike, every)):
            positions |= {2**k for k in range(longest.bit_length()) if FIRST <= 2**k < longest}
        windows: list[list[Window]] = [[] for _ in models]
        for texts in every:
            cut = cut_windows(texts, sorted(positions), self.windows)
            for own, further in zip(windows, cut, strict=True):
                own += further
        for start, stop in pairwise(windows[0][0].ends):
            if not any(window.bytes_between(start, stop) for window in windows[0]):
                raise UserError(
                    f"the tokens from {start} to {stop} are parts of one character, whose last "
                    "token has its bytes: give greater --lengths, or more text"
                )
        return [self._plan(*one) for one in zip(models, windows, strict=True)]

    def _plan(self, model: OpenCheckpoint, windows: Sequence[Window]) -> Plan:
        sizes = {length: max(one.size(length) for one in windows) for length in self.lengths}
        tokens = {length: min(size, self.context or size) for length, size in sizes.items()}
        reached, reasons = within(model, tokens, self._column())
        items = []
        for window in windows if reached else ():
            ends = {at: end for at, end in window.ends.items() if at <= reached[-1]}
            own, digest = window._replace(ends=ends), window.document.sha256
            key = {"text": digest[:16], "start": ends[0], "edges": own.edges}
            items.append(Item(key, own, (digest, window.number), own.edges[-1]))
        return Plan(items, reasons)

    def protocol(self, model: OpenCheckpoint) -> dict[str, Any]:
        return {"context": self.context, "stride": self.stride} if self.context else {}

    def measure(
        self, model: OpenCheckpoint, items: Sequence[Item], progress: Progress
    ) -> Iterator[Found]:
        for batch in batches(items, self.batch_size):
            tokens = torch.stack([item.spec.tokens() for item in batch])
            overlap = Overlap(self.context or batch[0].work, self.stride or batch[0].work)
            nats = torch.zeros(tokens.shape, dtype=torch.float64)
            for start, part in overlapping_losses(
                model.model, tokens, overlap, rows=self.batch_size, progress=progress
            ):
                nats[:, start + 1 : start + 1 + part.shape[1]] = part
            yield [
                (item, {"nats": [round(one, 6) for one in sums[item.spec.edges].diff().tolist()]})
                for item, sums in zip(batch, nats.cumsum(1), strict=True)
            ]

    def samples(self, item: Item, row: Row) -> Iterator[Sample]:
        window: Window = item.spec
        nats = dict(zip(window.ends, accumulate(row["nats"], initial=0.0), strict=True))

        def sample(column: Column, start: int, stop: int) -> Sample:
            bits, size = (nats[stop] - nats[start]) / math.log(2), window.bytes_between(start, stop)
            return Sample(column, stop, window.name, (bits, size))

        column = self._column()
        by_position = column._replace(name=f"{column.name} by position", drawn=True, listed=False)
        for start, stop in pairwise(nats):
            yield sample(by_position, start, stop)
        whole = column._replace(name=f"{column.name} from the start")
        for start, stop in pairwise([0, *(length for length in self.lengths if length in nats)]):
            yield sample(column, start, stop)
            if len(self.lengths) > 1:
                yield sample(whole, 0, stop)

    def _column(self) -> Column:
        return Column(f"{self.title}, bits per byte", RATIO, ".3f", drawn=False)

    def notes(self, found: Mapping[str, Found]) -> list[str]:
        nats = {name: sum(sum(row["nats"]) for _, row in own) for name, own in found.items() if own}
        each = [
            f"{math.exp(min(total / sum(item.work for item, _ in found[name]), 700)):,.2f} ({name})"
            for name, total in nats.items()
        ]
        return [f"Perplexity per token over all windows: {', '.join(each)}."]
