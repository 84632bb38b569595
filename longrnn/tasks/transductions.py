"""Tasks whose answer is a reordering of what was read: copying, reversing, sorting."""

from __future__ import annotations

from torch import Tensor

from longrnn.tasks.base import TASKS
from longrnn.tasks.sequence import Transduction


@TASKS.register("copy")
class Copy(Transduction):
    """Repeat a sequence in the order in which it was read; not autoregressive.

    With V = 10 and length 3, `?` being the query token (id V) and `.` an unscored target:

        tokens   7 1 4 ? ? ?
        targets  . . . 7 1 4

    Options are those of `SequenceTask`.
    """

    def answer(self, x: Tensor) -> Tensor:
        return x


@TASKS.register("reverse")
class Reverse(Transduction):
    """Repeat a sequence in reverse order (arXiv 2402.00236); not autoregressive.

    With V = 10 and length 3, `?` being the query token (id V) and `.` an unscored target:

        tokens   7 1 4 ? ? ?
        targets  . . . 4 1 7

    Options are those of `SequenceTask`.
    """

    def answer(self, x: Tensor) -> Tensor:
        return x.flip(1)


@TASKS.register("sort")
class Sort(Transduction):
    """Repeat the tokens of a sequence in the order of their ids (arXiv 2402.00236).

    With V = 10 and length 4, `?` being the query token (id V) and `.` an unscored target:

        tokens   7 1 4 1 ? ? ? ?
        targets  . . . . 1 1 4 7

    Options are those of `SequenceTask`.
    """

    def answer(self, x: Tensor) -> Tensor:
        return x.sort(dim=1).values
