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

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any

import torch

from longrnn.checkpoints.opened import OpenCheckpoint
from longrnn.errors import UserError
from longrnn.evaluation.base import Batches, Evaluation, Item, Plan, Results, Sample, within
from longrnn.evaluation.options import PerplexityOptions
from longrnn.evaluation.texts import Window, are_alike, cut_windows, read_documents
from longrnn.inference.engine import overlapping_losses
from longrnn.intervals import RATIO
from longrnn.progress import Progress
from longrnn.reporting.tables import Column
from longrnn.results import Result

# The first power of 2 that divides windows.
FIRST = 16


class Perplexity(Evaluation[PerplexityOptions]):
    """Loss by position, see `PerplexityOptions`."""

    def plan(self, models: Sequence[OpenCheckpoint]) -> list[Plan]:
        options = self.options
        if (options.context is None) != (options.stride is None):
            raise UserError("overlapping windows need both --context and --stride: give both")
        if options.context is not None and (options.stride or 1) > options.context:
            raise UserError(
                f"a stride of {options.stride} leaves out tokens between windows of "
                f"{options.context}: give a --stride of at most the --context"
            )
        longest = options.lengths[-1]
        count = (longest + 1) * options.newlines
        by_model = [read_documents(options.texts, m.tokenizer, m.model, count) for m in models]
        for documents, model in zip(by_model, models, strict=True):
            if documents[0].byte_ends is None:
                raise UserError(
                    f"the tokenizer of {model.name} does not know which bytes a token stands for: "
                    "use the fast tokenizer of the checkpoint, which has a tokenizer.json"
                )
        texts, positions = list(zip(*by_model, strict=True)), set(options.lengths)
        if all(map(are_alike, texts)):
            positions |= {2**k for k in range(longest.bit_length()) if FIRST <= 2**k < longest}
        windows: list[list[Window]] = [[] for _ in models]
        for tokenized in texts:
            cut = cut_windows(tokenized, sorted(positions), options.windows)
            for of_model, further in zip(windows, cut, strict=True):
                of_model += further
        for start, stop in pairwise(windows[0][0].ends):
            if not any(window.bytes_between(start, stop) for window in windows[0]):
                raise UserError(
                    f"the tokens from {start} to {stop} are parts of one character, whose last "
                    "token has its bytes: give greater --lengths, or more text"
                )
        return [self._plan(*pair) for pair in zip(models, windows, strict=True)]

    def _plan(self, model: OpenCheckpoint, windows: Sequence[Window]) -> Plan:
        sizes = {at: max(window.size(at) for window in windows) for at in self.options.lengths}
        tokens = {at: min(size, self.options.context or size) for at, size in sizes.items()}
        reached, reasons = within(model, tokens, self.column)
        items = []
        for window in windows if reached else ():
            ends = {at: end for at, end in window.ends.items() if at <= reached[-1]}
            window, digest = window._replace(ends=ends), window.document.sha256
            key = {"text": digest[:16], "start": ends[0], "edges": window.edges}
            items.append(Item(key, window, (digest, window.number), window.edges[-1]))
        return Plan(items, reasons)

    def protocol(self, model: OpenCheckpoint) -> dict[str, Any]:
        return self.options.model_dump(include={"context", "stride"}, exclude_none=True)

    def measure(self, model: OpenCheckpoint, items: Sequence[Item], progress: Progress) -> Batches:
        options = self.options
        for batch in self.batched(items, options.batch_size):
            tokens = torch.stack([item.spec.tokens() for item in batch])
            nats = torch.zeros(tokens.shape, dtype=torch.float64)
            losses = overlapping_losses(
                model.model,
                tokens,
                progress,
                context=options.context or batch[0].work,
                stride=options.stride or batch[0].work,
                rows=options.batch_size,
                bos_id=model.tokenizer.bos_id,
            )
            for start, part in losses:
                nats[:, start + 1 : start + 1 + part.shape[1]] = part
            yield [
                (item, {"nats": [round(n, 6) for n in sums[item.spec.edges].diff().tolist()]})
                for item, sums in zip(batch, nats.cumsum(1), strict=True)
            ]

    def samples(self, item: Item, result: Result) -> Iterator[Sample]:
        window: Window = item.spec
        nats = dict(zip(window.ends, accumulate(result["nats"], initial=0.0), strict=True))

        def sample(column: Column, start: int, stop: int) -> Sample:
            bits, size = (nats[stop] - nats[start]) / math.log(2), window.bytes_between(start, stop)
            return Sample(column, stop, window.name, (bits, size))

        column = self.column
        by_position = column._replace(name=f"{column.name} by position", drawn=True, listed=False)
        for start, stop in pairwise(nats):
            yield sample(by_position, start, stop)
        whole = column._replace(name=f"{column.name} from the start")
        for start, stop in pairwise(
            [0, *(length for length in self.options.lengths if length in nats)]
        ):
            yield sample(column, start, stop)
            if len(self.options.lengths) > 1:
                yield sample(whole, 0, stop)

    @property
    def column(self) -> Column:
        """The loss between two lengths."""
        return Column(f"{self.title}, bits per byte", RATIO, ".3f", drawn=False)

    def notes(self, results: Mapping[str, Results]) -> list[str]:
        texts = []
        for name, measured in results.items():
            # Windows that end earlier have other tokens.
            if measured and self.options.lengths[-1] in measured[0][0].spec.ends:
                nats = sum(sum(result["nats"]) for _, result in measured)
                tokens = sum(item.work for item, _ in measured)
                texts.append(f"{math.exp(min(nats / tokens, 700)):,.2f} ({name})")
        return [f"Perplexity per token over all windows: {', '.join(texts)}."] if texts else []
