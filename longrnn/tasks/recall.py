"""Multi-query associative recall."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from longrnn.errors import LengthError, UserError
from longrnn.tasks.base import TASKS, UNSCORED, Batch, row_starts
from longrnn.tasks.sequence import SequenceTask, distinct


@TASKS.register("recall")
class Recall(SequenceTask):
    """Pairs of a key and a value, then every key once more: what is its value? (arXiv 2312.04927).

    Keys are distinct and come from the lower half of the vocabulary, values from the upper. With
    V = 10 and length 6, `.` being an unscored target:

        tokens   2 9 0 7 1 9 1 2 0
        targets  . . . . . . 9 9 7

    `length` counts the tokens of the pairs and is even; the keys are asked in a random order.
    Options are those of `SequenceTask`.
    """

    default_length = 16
    has_query = False

    def check(self, length: int) -> None:
        if length < 2 or length % 2:
            raise UserError(
                f"recall has pairs of a key and a value, so its length is even, not {length}: take "
                f"a length of {max(2, length + 1)}"
            )
        if length // 2 > self.n_tokens // 2:
            raise LengthError(
                f"recall has {length // 2} distinct keys and half of vocab_size={self.n_tokens} to "
                f"take them from: set vocab_size={length} or more, or take a smaller length"
            )

    def count(self, length: int) -> int:
        keys, values, pairs = self.n_tokens // 2, self.n_tokens - self.n_tokens // 2, length // 2
        return math.perm(keys, pairs) * values**pairs * math.factorial(pairs)

    def draw(self, n: int, length: int, generator: torch.Generator) -> Tensor:
        """Pairs, then the keys in the order in which they are asked, `(n, 3 · length / 2)`."""
        pairs, lower = length // 2, self.n_tokens // 2
        keys = distinct(n, pairs, lower, generator)
        values = torch.randint(lower, self.n_tokens, (n, pairs), generator=generator)
        asked = keys.gather(1, distinct(n, pairs, pairs, generator))
        return torch.cat([torch.stack([keys, values], dim=2).flatten(1), asked], dim=1)

    def batch(self, x: Tensor) -> Batch:
        length = x.shape[1] // 3 * 2
        keys, values, asked = x[:, :length:2], x[:, 1:length:2], x[:, length:]
        place = (asked[:, :, None] == keys[:, None, :]).int().argmax(dim=2)
        unscored = torch.full_like(x[:, :length], UNSCORED)
        return Batch(
            tokens=x,
            targets=torch.cat([unscored, values.gather(1, place)], dim=1),
            is_document_start=row_starts(x),
        )
