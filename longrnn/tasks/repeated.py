"""Long token sequences that are mostly filler, without holding them whole."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class RepeatedTokens(NamedTuple):
    """`size` tokens of `tokens` `(n,)` from `start` on, over and over."""

    tokens: Tensor
    start: int
    size: int

    def read(self, start: int, stop: int) -> Tensor:
        """Its own tokens `start` up to `stop`."""
        index = torch.arange(self.start + start, self.start + stop) % len(self.tokens)
        return self.tokens[index]


def whole(tokens: Tensor) -> RepeatedTokens:
    """All of `tokens`, once."""
    return RepeatedTokens(tokens, 0, len(tokens))


def length(spans: Sequence[RepeatedTokens]) -> int:
    """Tokens of spans laid end to end."""
    return sum(span.size for span in spans)


def read(spans: Sequence[RepeatedTokens], start: int = 0, stop: int | None = None) -> Tensor:
    """Tokens `start` up to `stop` of spans laid end to end, `(stop − start,)`."""
    stop = length(spans) if stop is None else stop
    parts, begin = [torch.empty(0, dtype=torch.long)], 0
    for span in spans:
        low, high = max(start - begin, 0), min(stop - begin, span.size)
        if low < high:
            parts.append(span.read(low, high))
        begin += span.size
    return torch.cat(parts)
