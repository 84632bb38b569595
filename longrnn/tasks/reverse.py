"""Reverse ordering of random tokens, with a vocabulary as large as one likes."""

from __future__ import annotations

from torch import Tensor

from longrnn.tasks.base import TASKS
from longrnn.tasks.sequence import Transduction


@TASKS.register("reverse")
class Reverse(Transduction):
    """Say a sequence backwards (arXiv 2402.00236); not autoregressive.

    With V = 10 and length 3, `?` being the query token (id V) and `.` an unscored target:

        tokens   7 1 4 ? ? ?
        targets  . . . 4 1 7

    Options are those of `SequenceTask`.
    """

    def answer(self, x: Tensor) -> Tensor:
        return x.flip(1)
