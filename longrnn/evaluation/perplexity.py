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
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import torch
from pydantic import PrivateAttr
from torch import Tensor

from longrnn import processes
from longrnn.errors import UserError
from longrnn.evaluation.base import Column, Evaluation, Found, Item, Measurement
from longrnn.evaluation.forgetting import FACTOR, forgetting
from longrnn.evaluation.options import PerplexityOptions
from longrnn.evaluation.texts import (
    Document,
    are_alike,
    newlines,
    read_documents,
    shared_places,
)
from longrnn.hf.opened import OpenCheckpoint
from longrnn.hf.training_length import training_length
from longrnn.inference.engine import out_of_reach, token_losses
from longrnn.inference.overlapping import Overlap, overlapping_losses
from longrnn.intervals import FIGURE, MEAN, RATIO, Estimate, mean
from longrnn.models import LanguageModel
from longrnn.progress import Progress
from longrnn.units import format_length

if TYPE_CHECKING:
    from longrnn.evaluation.base import Cell
    from longrnn.evaluation.report import Picture

# Tokens of the stretches whose losses a row records, after the first one.
STRETCH = 64


class Window(NamedTuple):
    """Tokens of a text that are read from an empty state.

    Attributes:
        document: the text.
        number: which window of it, the same for all models.
        start: index of its first token.
        edges: positions between which losses are summed, from 0 to its length.
    """

    document: Document
    number: int
    start: int
    edges: tuple[int, ...]

    @property
    def length(self) -> int:
        """Number of tokens that are read."""
        return self.edges[-1]

    def tokens(self) -> Tensor:
        """Return the tokens, `(length + 1,)`; the last one is only predicted."""
        return self.document.tokens[self.start : self.start + self.length + 1]

    def bytes_before(self, edges: Sequence[int]) -> list[int] | None:
        """Return the byte of the text at each edge; None if byte offsets are not known."""
        ends = self.document.byte_ends
        return None if ends is None else ends[self.start + torch.tensor(edges)].tolist()


class Perplexity(PerplexityOptions, Evaluation):
    """Loss by position, see `PerplexityOptions`."""

    kind: ClassVar[str] = "perplexity"

    _windows: dict[str, list[Window]] = PrivateAttr(default_factory=dict)
    _cuts: dict[str, list[list[int]]] = PrivateAttr(default_factory=dict)

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
        longest = self.lengths[-1]
        of_model = [read_documents(self.texts, model.tokenizer, model.model) for model in models]
        if self.newlines:
            for documents, model in zip(of_model, models, strict=True):
                documents.append(newlines(model.tokenizer, longest + 1))
        self._windows = {model.name: [] for model in models}
        self._cuts = {model.name: [] for model in models}
        for texts in zip(*of_model, strict=True):
            count = (len(texts[0].tokens) - 1) // longest
            if count < 1:
                raise UserError(
                    f"{texts[0].name} has {len(texts[0].tokens):,} tokens and a window of "
                    f"{format_length(longest)} needs {longest + 1:,} (the last one is only "
                    "predicted): give a longer text or smaller --lengths"
                )
            alike, most = are_alike(texts), self.windows or count
            chosen = range(count) if count <= most else [i * count // most for i in range(most)]
            places = [
                number * longest + edge for number in range(count) for edge in (0, *self.lengths)
            ]
            for model, text, at in zip(
                models, texts, shared_places(texts, sorted(set(places))), strict=True
            ):
                index = dict(zip(sorted(set(places)), at, strict=True))
                for number in chosen:
                    first = number * longest
                    start = index[first]
                    cuts = [index[first + edge] - start for edge in (0, *self.lengths)]
                    cuts = cuts[: 1 + sum(self._reason(model, cut) is None for cut in cuts[1:])]
                    self._cuts[model.name].append(cuts)
                    if len(cuts) > 1:
                        edges = sorted({*_grid(cuts[-1]), *cuts}) if alike else cuts
                        window = Window(text, number, start, tuple(edges))
                        self._windows[model.name].append(window)

    def _reason(self, model: OpenCheckpoint, length: int) -> str | None:
        """Return why a model cannot score so many tokens."""
        return out_of_reach(model.model, min(length, self.context or length))

    def protocol(self, model: OpenCheckpoint) -> dict[str, Any]:
        return {} if self.overlap is None else self.overlap._asdict()

    def items(self, model: OpenCheckpoint) -> list[Item]:
        found = []
        for window in self._windows[model.name]:
            key = {
                "text": window.document.sha256[:16],
                "start": window.start,
                "length": window.length,
            }
            if further := sorted(set(window.edges) - set(_grid(window.length))):
                key["edges"] = further
            found.append(Item(key, window, (window.document.sha256, window.number), window.length))
        return found

    def measure(
        self, model: OpenCheckpoint, items: Sequence[Item], progress: Progress
    ) -> Iterator[Found]:
        most = processes.batch_size(len(items) * processes.size(), self.batch_size)
        for shape in dict.fromkeys((item.spec.length, len(item.spec.edges)) for item in items):
            same = [i for i in items if (i.spec.length, len(i.spec.edges)) == shape]
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
        windows = [(item.spec, row["nats"]) for item, row in found]
        known = all(window.document.byte_ends is not None for window, _ in windows)
        unit = "bits per byte" if known else "nats per token"
        here = Column(f"{self.title}, {unit}", RATIO if known else MEAN, ".3f")
        whole = Column(f"{self.title}, {unit} from the start", here.quantity, ".3f", drawn=False)
        read = Column(f"{self.title}, tokens read per token", FIGURE, ".2f", drawn=False)
        for number, length in enumerate(self.lengths, 1):
            cut = [own[number] for own in self._cuts[model.name] if len(own) > number]
            reason = self._reason(model, max([length, *cut]))
            samples: dict[Column, dict[str, Any]] = {here: {}, whole: {}}
            for (window, nats), cuts in zip(windows, self._cuts[model.name], strict=False):
                if len(cuts) > number:
                    name = f"{window.document.sha256[:16]}/{window.number}"
                    for column, start in ((here, cuts[number - 1]), (whole, 0)):
                        samples[column][name] = _sample(window, nats, start, cuts[number], known)
            for column in (here, whole) if len(self.lengths) > 1 else (here,):
                own = samples[column]
                measurements.append(
                    Measurement(column, length, own, None if own else reason or "not measured")
                )
            if self.overlap is not None and samples[here]:
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
        from longrnn.evaluation.figures import Line, lines
        from longrnn.evaluation.report import Picture, by_length

        alike = all(len(i.spec.edges) > len(self.lengths) + 1 for f in found.values() for i, _ in f)
        if not alike:
            return by_length(self, cells)
        drawn = []
        for name, own in found.items():
            if own:
                buckets = by_bucket(own)
                middles = [(start + 1 + stop) / 2 for start, stop, _ in buckets]
                drawn.append(Line(name, middles, [estimate for *_, estimate in buckets]))
        marks = sorted({one for model in models if (one := self.trained(model)) is not None})
        level = None
        if len(drawn) == 1 and self.overlap is None and marks:
            rows = [(i.spec.edges, row["nats"]) for i, row in found[drawn[0].label]]
            if judged := forgetting(rows, marks[0]):
                bound = f"{FACTOR:g} × the largest loss inside the training length"
                level = FACTOR * judged.inside, bound
        png = lines(
            drawn,
            across="tokens read",
            up="nats per token",
            ticks=[*(4**k for k in range(12) if 4**k < self.lengths[0]), *self.lengths],
            marks={mark: f"training length of {mark:,}" for mark in marks},
            level=level,
            limits=(0, None),
        )
        caption = "Loss by position, means over windows with 95 % intervals."
        return [Picture(f"{self.title}_by_position", caption, png)]


def by_bucket(found: Found) -> list[tuple[int, int, Estimate]]:
    """Return the mean loss in nats per token between the powers of 2, with its interval.

    Args:
        found: results of windows of one length.
    """
    edges = _powers(found[0][0].spec.length)
    values = [
        [_sum(item.spec.edges, row["nats"], a, b) / (b - a) for item, row in found]
        for a, b in pairwise(edges)
    ]
    return [(a, b, mean(own)) for (a, b), own in zip(pairwise(edges), values, strict=True)]


def losses(
    model: LanguageModel,
    windows: Tensor,
    edges: Tensor,
    progress: Progress | None = None,
    overlap: Overlap | None = None,
    *,
    rows: int = 1,
) -> Tensor:
    """Return sums of the loss in nats over parts of windows, in one pass.

    Args:
        model: any language model; it starts from an empty state and reads the windows in pieces.
        windows: `(b, length + 1)` tokens; the last one is only predicted.
        edges: `(b, k + 1)` edges of the parts of each row, from 0 to `length`.
        progress: counts the tokens.
        overlap: if set, tokens are scored in overlapping windows of this context.
        rows: overlapping windows in one batch, of all windows together.

    Returns:
        `(b, k)` float64 on the CPU.

    Raises:
        UserError: the logits are not finite.
    """
    sums = torch.zeros(len(windows), edges.shape[1] - 1, dtype=torch.float64)
    if overlap is None:
        parts = token_losses(model, windows)
    else:
        parts = overlapping_losses(model, windows, overlap, rows=rows, progress=progress)
    for start, nats in parts:
        positions = torch.arange(start, start + nats.shape[1]).repeat(len(windows), 1)
        sums.scatter_add_(1, torch.searchsorted(edges, positions, right=True) - 1, nats)
        if overlap is None and progress is not None:
            progress.advance(nats.numel(), nats.numel())
    return sums


def _powers(length: int) -> list[int]:
    """Return 0, 1, 2, 4, 8, …, length."""
    return [0, *(2**k for k in range((length - 1).bit_length())), length]


def _grid(length: int) -> list[int]:
    """Return the edges that every window has: powers of 2 up to STRETCH, then its multiples."""
    return [*_powers(min(STRETCH, length)), *range(2 * STRETCH, length, STRETCH), length][
        : None if length > STRETCH else -1
    ]


def _sum(edges: Sequence[int], nats: Sequence[float], start: int, stop: int) -> float:
    """Return the sum of losses between two edges."""
    return math.fsum(nats[edges.index(start) : edges.index(stop)])


def _sample(window: Window, nats: Sequence[float], start: int, stop: int, known: bool) -> Any:
    """Return bits and bytes between two edges, or nats per token if bytes are not known."""
    total = _sum(window.edges, nats, start, stop)
    if not known:
        return total / (stop - start)
    first, last = window.bytes_before([start, stop]) or (0, 1)
    return total / math.log(2), last - first
