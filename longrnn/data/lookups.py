"""Sequences that are asked about their own tokens (arXiv 2402.00236; 2312.04927 for `recall`)."""

from __future__ import annotations

import torch
from torch import Tensor

from longrnn.data.batch import TASKS, UNSCORED
from longrnn.data.sequences import SequenceTask


@TASKS.register("predecessor_query")
class PredecessorQuery(SequenceTask):
    """Distinct tokens, then one of them again: which came right before it?

    tokens   7 1 4 8 4
    targets  . . . . 1

    `length` counts the distinct tokens; the last input asks about one that has a predecessor.
    """

    has_query = False

    @property
    def lengths(self) -> range:
        return range(2, self.n_tokens + 1)

    def draw(self, n: int, length: int, generator: torch.Generator) -> Tensor:
        """The distinct tokens and, as the last of `(n, length + 1)`, the one asked about."""
        x = distinct(n, length, self.n_tokens, generator)
        place = torch.randint(1, length, (n, 1), generator=generator)
        return torch.cat([x, x.gather(1, place)], dim=1)

    def rule(self, x: Tensor) -> tuple[Tensor, Tensor]:
        place = (x[:, :-1] == x[:, -1:]).int().argmax(dim=1, keepdim=True)
        targets = torch.full_like(x, UNSCORED)
        targets[:, -1:] = x.gather(1, place - 1)
        return x, targets


@TASKS.register("recall")
class Recall(SequenceTask):
    """Pairs of a key and a value, then every key once more: what is its value?

    Keys are distinct and come from the lower half of the vocabulary, values from the upper:

    tokens   2 9 0 7 1 9 1 2 0
    targets  . . . . . . 9 9 7

    `length` counts the tokens of the pairs and is even; the keys are asked in a random order.
    """

    has_query = False

    @property
    def lengths(self) -> range:
        return range(2, self.n_tokens // 2 * 2 + 1, 2)

    def draw(self, n: int, length: int, generator: torch.Generator) -> Tensor:
        """Pairs, then the keys in the order in which they are asked, `(n, 3 · length / 2)`."""
        pairs, lower = length // 2, self.n_tokens // 2
        keys = distinct(n, pairs, lower, generator)
        values = torch.randint(lower, self.n_tokens, (n, pairs), generator=generator)
        asked = keys.gather(1, distinct(n, pairs, pairs, generator))
        return torch.cat([torch.stack([keys, values], dim=2).flatten(1), asked], dim=1)

    def rule(self, x: Tensor) -> tuple[Tensor, Tensor]:
        length = x.shape[1] // 3 * 2
        keys, values, asked = x[:, :length:2], x[:, 1:length:2], x[:, length:]
        place = (asked[:, :, None] == keys[:, None, :]).int().argmax(dim=2)
        unscored = torch.full_like(x[:, :length], UNSCORED)
        return x, torch.cat([unscored, values.gather(1, place)], 1)


def distinct(n: int, length: int, n_tokens: int, generator: torch.Generator) -> Tensor:
    """`(n, length)` int64: rows of distinct ids below `n_tokens`, every order equally likely."""
    return torch.rand(n, n_tokens, generator=generator).topk(length, dim=1).indices
