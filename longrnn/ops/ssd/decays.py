"""Decays of a chunk and their products, at the precision that a recurrence needs.

Decays between two tokens of a chunk are differences of one running sum, kept in float64 or as two
float32 halves: see `longrnn.ops.ssd.chunked`.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional as F

FLOOR = -80.0


def running_sums(log_decay: Tensor, chunks: int) -> Tensor:
    """Sums from each chunk's start, `(b, m, j, h)` float64, from `(b, t, h)`.

    A log decay of −∞ becomes a finite number whose exp is 0 too. It is not much below FLOOR,
    because later sums have only the digits that it leaves.
    """
    return log_decay.double().clamp(min=2 * FLOOR).unflatten(1, (chunks, -1)).cumsum(2)


def decay_between(total: Tensor, dtype: torch.dtype) -> Tensor:
    """exp(Σ log_decay over (j, i]) as `(b, m, h, i, j)`: 0 below e^FLOOR, and 1 where j > i.

    Args:
        total: running sums of log_decay in a chunk, `(b, m, i, h)` float64.
        dtype: of the result.
    """
    high, low = _halves(total.transpose(2, 3), dtype)
    # Negating before broadcasting: the gradient of a difference would be as large as the result.
    between = high[..., :, None] + (-high)[..., None, :]
    between.add_(low[..., :, None]).sub_(low[..., None, :])
    # Outside the graph, so that nothing is saved for the backward pass: below FLOOR the gradient
    # is 0 to rounding like the decay itself, and only the unused entries with j > i exceed 0.
    between.detach().clamp_(FLOOR, 0)
    between.exp_()
    # `exp` of −∞ would take twice the time. Through `data`, so that the backward pass sees the
    # zeros too: the derivative of exp is its value.
    F.threshold(between.data, 1.001 * math.exp(FLOOR), 0.0, inplace=True)
    return between


def split_decay(log_decay: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """exp(log_decay) as two numbers of `dtype` that add up to it: 0 or 1, and the rest.

    The product of the first with a state is exact, and the second keeps all its digits, so a new
    state is rounded only once, when the kept part and the new input are added.
    """
    log_decay = F.threshold(log_decay, FLOOR, -torch.inf)
    slow = log_decay > -0.69  # above one half, where 1 is nearer than 0
    rest = torch.where(slow, log_decay.expm1(), log_decay.exp())
    return slow.to(dtype), rest.to(dtype)


def _halves(value: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Two numbers of `dtype` that add up to `value`; the gradient flows through the first."""
    high = value.to(dtype)
    return high, (value - high).detach().to(dtype)


def exp_in_place(log_decay: Tensor) -> Tensor:
    """exp, computed in place, and 0 below FLOOR; no other code may hold the argument."""
    log_decay.detach().masked_fill_(log_decay < FLOOR, -torch.inf)
    return log_decay.exp_()


def floored_exp(log_decay: Tensor, dtype: torch.dtype) -> Tensor:
    """exp in `dtype`, and 0 below FLOOR; only entries that are masked out later exceed 0."""
    value = log_decay.clamp(max=0).to(dtype)
    return value.masked_fill(value < FLOOR, -torch.inf).exp()


def add_decayed(to: Tensor, log_decay: Tensor, state: Tensor) -> Tensor:
    """to + exp(log_decay) · state, the decay in two halves so that a long memory does not drift.

    Args:
        to: `(b, h, p, n)`, as `state` is.
        log_decay: `(b, h)` float64.
    """
    decay = log_decay.exp()
    high = decay.to(to.dtype)
    low = (decay - high).detach().to(to.dtype)
    return torch.addcmul(
        torch.addcmul(to, low[..., None, None], state), high[..., None, None], state
    )
