"""`unroll` loops over time."""

from __future__ import annotations

import torch
from longrnn.ops.unroll import unroll


def test_unroll_reads_after_each_step() -> None:
    """The output of a token is computed from the state after it."""
    x = torch.arange(1.0, 7.0).view(1, 6, 1)
    start = torch.tensor([[10.0]])
    y, final = unroll(lambda token, total: total + token, lambda total: 2 * total, x, start)
    assert torch.equal(y, 2 * (10 + x.cumsum(1)))
    assert final.item() == 31
    assert start.item() == 10
