"""Windows of texts whose loss is summed between edges, cut at the same bytes for all models."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from longrnn.errors import UserError
from longrnn.evaluation.texts import Document, are_alike, shared_places
from longrnn.inference.engine import token_losses
from longrnn.inference.overlapping import Overlap, overlapping_losses
from longrnn.models import LanguageModel
from longrnn.progress import Progress
from longrnn.units import format_length


class Window(NamedTuple):
    """Tokens of a text that are read from an empty state.

    Attributes:
        document: the text.
        number: which window of it, the same for all models.
        start: index of its first token.
        cuts: 0 and the positions in this window that stand for the lengths of the evaluation.
        edges: positions between which losses are summed, from 0 to its length; cuts among them.
    """

    document: Document
    number: int
    start: int
    cuts: list[int]
    edges: list[int]

    @property
    def name(self) -> str:
        """Its name, the same for all models."""
        return f"{self.document.sha256[:16]}/{self.number}"

    @property
    def length(self) -> int:
        """Number of tokens that are read."""
        return self.edges[-1]

    def tokens(self) -> Tensor:
        """Return the tokens, `(length + 1,)`; the last one is only predicted."""
        return self.document.tokens[self.start : self.start + self.length + 1]

    def sum(self, nats: Sequence[float], start: int, stop: int) -> float:
        """Return the sum of losses between two edges."""
        return math.fsum(nats[self.edges.index(start) : self.edges.index(stop)])

    def sample(self, nats: Sequence[float], start: int, stop: int) -> tuple[float, int]:
        """Return bits and bytes between two edges, or nats and tokens if bytes are not known."""
        total, ends = self.sum(nats, start, stop), self.document.byte_ends
        if ends is None:
            return total, stop - start
        return total / math.log(2), int(ends[self.start + stop] - ends[self.start + start])


def cut_windows(
    texts: Sequence[Document], lengths: Sequence[int], most: int | None, reach: Sequence[float]
) -> list[list[Window]]:
    """Return the windows of a text for each model, as long as the last length within its reach.

    Args:
        texts: the text, tokenized for each model.
        lengths: in tokens of the first model.
        most: at most this many windows, spread evenly; None for all.
        reach: the most tokens that each model can score.

    Raises:
        UserError: the text is too short, or see `shared_places`.
    """
    if are_alike(texts):  # tokenizers may still disagree on where a token inside a character ends
        texts = [texts[0]] * len(texts)
    longest, first = lengths[-1], texts[0]
    count = (len(first.tokens) - 1) // longest
    if count < 1:
        raise UserError(
            f"{first.name} has {len(first.tokens):,} tokens and a window of "
            f"{format_length(longest)} needs {longest + 1:,} (the last one is only predicted): "
            "give a longer text or a smaller last length"
        )
    most = min(most or count, count)
    numbers = [number * count // most for number in range(most)]
    places = sorted({number * longest + edge for number in numbers for edge in (0, *lengths)})
    found: list[list[Window]] = []
    for text, at, limit in zip(texts, shared_places(texts, places), reach, strict=True):
        index = dict(zip(places, at, strict=True))
        found.append([])
        for number in numbers:
            start, *stops = (index[number * longest + edge] for edge in (0, *lengths))
            cuts = [0, *(stop - start for stop in stops if stop - start <= limit)]
            edges = sorted({*powers(cuts[-1]), *cuts}) if are_alike(texts) else cuts
            if len(cuts) > 1:
                found[-1].append(Window(text, number, start, cuts, edges))
    return found


def powers(length: int) -> list[int]:
    """Return 0, 1, 2, 4, 8, …, length."""
    return [0, *(2**k for k in range((length - 1).bit_length())), length]


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
