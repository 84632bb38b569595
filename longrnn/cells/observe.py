"""Observes the recurrences of a model: sums of log decays, by forward hooks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import Tensor, nn

from longrnn.cells.base import Cell
from longrnn.cells.edit import Update


class DecaySum:
    """The sum of one cell's log decays over all tokens read while it is observed.

    Attributes:
        total: `(b, h, 1)` by head or `(b, 1, d)` by unit, float64, because a float32 sum over a
            million tokens has lost its digits; None before the first token, and in a cell without
            decays.
    """

    total: Tensor | None = None

    def see(self, module: nn.Module, args: tuple[Any, ...], output: object) -> None:
        """A forward hook of `Cell.recurrence`."""
        seen = args[0]
        if not isinstance(seen, Update):
            found = seen.log_decay.double().sum(1)[..., None]
        elif seen.keep is not None:
            found = seen.keep.double().log()[:, None]
        else:
            return
        self.total = found if self.total is None else self.total + found


@contextmanager
def decay_sums(cells: Sequence[Cell]) -> Iterator[list[DecaySum]]:
    """A context in which the log decays of each cell are summed."""
    sums = [DecaySum() for _ in cells]
    with ExitStack() as hooks:
        for cell, one in zip(cells, sums, strict=True):
            hooks.callback(cell.recurrence.register_forward_hook(one.see).remove)
        yield sums
