"""Copying random tokens."""

from __future__ import annotations

from torch import Tensor

from longrnn.tasks.base import TASKS
from longrnn.tasks.sequence import Transduction


@TASKS.register("copy")
class Copy(Transduction):
    """Say a sequence again, in the order in which it was read; not autoregressive.

    With V = 10 and length 3, `?` being the query token (id V) and `.` an unscored target:

        tokens   7 1 4 ? ? ?
        targets  . . . 7 1 4

    Options are those of `SequenceTask`.
    """

    def answer(self, x: Tensor) -> Tensor:
        return x
