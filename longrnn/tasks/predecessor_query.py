"""Naming the token that came before a given one."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from longrnn.errors import LengthError, UserError
from longrnn.tasks.base import TASKS, UNSCORED, Batch, row_starts
from longrnn.tasks.sequence import SequenceTask, distinct


@TASKS.register("predecessor_query")
class PredecessorQuery(SequenceTask):
    """Distinct tokens, then one of them again: which came right before it? (arXiv 2402.00236).

    With V = 10 and length 4, `.` being an unscored target:

        tokens   7 1 4 8 4
        targets  . . . . 1

    `length` counts the distinct tokens; the last input asks about one that has a predecessor.
    Options are those of `SequenceTask`.
    """

    default_length = 16
    has_query = False

    def check(self, length: int) -> None:
        if length < 2:
            raise UserError(
                f"predecessor_query needs at least 2 tokens, not {length}: use a greater length"
            )
        if length > self.n_tokens:
            raise LengthError(
                f"predecessor_query has {length} distinct tokens and vocab_size={self.n_tokens}: "
                f"set vocab_size={length} or more, or take a smaller length"
            )

    def count(self, length: int) -> int:
        return math.perm(self.n_tokens, length) * (length - 1)

    def draw(self, n: int, length: int, generator: torch.Generator) -> Tensor:
        """The distinct tokens and, as the last of `(n, length + 1)`, the one asked about."""
        x = distinct(n, length, self.n_tokens, generator)
        place = torch.randint(1, length, (n, 1), generator=generator)
        return torch.cat([x, x.gather(1, place)], dim=1)

    def batch(self, x: Tensor) -> Batch:
        place = (x[:, :-1] == x[:, -1:]).int().argmax(dim=1, keepdim=True)
        targets = torch.full_like(x, UNSCORED)
        targets[:, -1:] = x.gather(1, place - 1)
        return Batch(tokens=x, targets=targets, is_document_start=row_starts(x))
