"""Batches made in the background are those that were asked for."""

from __future__ import annotations

import threading

import pytest
import torch

from longrnn.errors import UserError
from longrnn.tasks import Batch
from longrnn.training.prefetch import Prefetch

CPU = torch.device("cpu")


def batch(number: int) -> Batch:
    tokens = torch.full((1, 2), number)
    return Batch(tokens, tokens, torch.ones(1, 2, dtype=torch.bool))


def test_any_micro_batch_in_any_order() -> None:
    """Batches come as asked for, also when a step is repeated or skipped, each made once ahead."""
    made: list[tuple[int, int]] = []
    threads: set[int] = set()

    def make(step: int, micro: int) -> list[Batch]:
        made.append((step, micro))
        threads.add(threading.get_ident())
        return [batch(10 * step + micro)]

    ahead = Prefetch(make, 2, 5, CPU)
    for step, micro in [(0, 0), (0, 1), (1, 0), (1, 0), (0, 1), (4, 1), (3, 0)]:
        assert int(ahead.segments(step, micro)[0].tokens[0, 0]) == 10 * step + micro
    ahead.close()
    assert all(step < 5 for step, _ in made)
    assert len(threads) == 1
    assert threading.get_ident() not in threads

    made.clear()
    straight = Prefetch(make, 2, 5, CPU)
    for step in range(5):
        for micro in (0, 1):
            straight.segments(step, micro)
    straight.close()
    assert made == [(step, micro) for step in range(5) for micro in (0, 1)]


def test_errors_of_the_thread_are_raised_where_the_batch_is_used() -> None:
    """A batch that cannot be made raises its error at its own step, not earlier."""

    def make(step: int, micro: int) -> list[Batch]:
        if step == 1:
            raise UserError("tokens.bin is damaged: build it again")
        return [batch(step)]

    ahead = Prefetch(make, 1, 5, CPU)
    assert int(ahead.segments(0, 0)[0].tokens[0, 0]) == 0
    with pytest.raises(UserError, match="damaged"):
        ahead.segments(1, 0)
    ahead.close()
