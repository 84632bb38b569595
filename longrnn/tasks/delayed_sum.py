"""Adding the second half of a sequence to its first half backwards."""

from __future__ import annotations

import torch
from torch import Tensor

from longrnn.errors import UserError
from longrnn.tasks.base import TASKS, UNSCORED, Batch, row_starts
from longrnn.tasks.sequence import SequenceTask


@TASKS.register("delayed_sum")
class DelayedSum(SequenceTask):
    """At each token of the second half, its sum with the mirrored token of the first, modulo V.

    As in arXiv 2402.00236 there are no query tokens: the answer is predicted while the second
    half is read. With V = 10 and length 6, `.` being an unscored target:

        tokens   7 1 4 2 5 8
        targets  . . . 6 6 5

    `length` counts both halves and is even. Options are those of `SequenceTask`.
    """

    default_length = 16
    has_query = False

    def check(self, length: int) -> None:
        super().check(length)
        if length % 2:
            raise UserError(
                f"delayed_sum has two equal halves, so its length is even, not {length}: take "
                f"a length of {length + 1}"
            )

    def batch(self, x: Tensor) -> Batch:
        first, second = x.chunk(2, dim=1)
        answer = (first.flip(1) + second) % self.n_tokens
        return Batch(
            tokens=x,
            targets=torch.cat([torch.full_like(first, UNSCORED), answer], dim=1),
            is_document_start=row_starts(x),
        )
