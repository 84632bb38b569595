"""Gated DeltaNet: its rule equals a loop over tokens; tests/hf/hybrid compares its layer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from longrnn.ops.delta import DELTA
from longrnn.ops.delta import definition as delta
from longrnn.ops.scan.definition import ScanInputs
from tests.backends.test_operations import assert_near, inputs_of, local, results

pytestmark = pytest.mark.core


def definition(inputs: ScanInputs, h: Tensor, limit: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """S_t = α_t (I − β_t k kᵀ) S_{t−1} + β_t k vᵀ with h = Sᵀ, as the paper writes it."""
    x, gain, log_decay, B, C = inputs
    share, outputs = x.shape[2] // B.shape[2], []
    for t in range(x.shape[1]):
        k, q = (one[:, t].repeat_interleave(share, 1) for one in (B, C))
        v, beta, alpha = x[:, t], gain[:, t, :, None, None], log_decay[:, t, :, None, None].exp()
        transition = alpha * (
            torch.eye(k.shape[-1], dtype=k.dtype) - beta * k[..., None] * k[..., None, :]
        )
        h = h @ transition + beta * v[..., None] * k[..., None, :]
        if limit is not None:
            norm = h.square().sum((2, 3), keepdim=True).sqrt()
            h = torch.where(norm > limit[:, None, None], h * limit[:, None, None] / norm, h)
        outputs.append((h @ q[..., None])[..., 0])
    return torch.stack(outputs, 1), h


def random_inputs(time: int, starts: Sequence[int] = ()) -> tuple[ScanInputs, Tensor]:
    """Two rows of four heads in two groups, with β in (0, 2] and unit keys."""
    inputs, state = inputs_of((2, time, 4, 5, 2, 6), torch.float64)
    inputs.log_decay[-1, list(starts)] = -torch.inf
    B = F.normalize(inputs.B, dim=-1)
    return inputs._replace(gain=inputs.gain.clamp(max=2), B=B), state


def outcome(rule: Any, inputs: ScanInputs, state: Tensor, *more: Tensor) -> list[Tensor]:
    """Outputs, final state, and the gradients of all inputs and of the initial state."""
    return results(
        lambda *given: rule(ScanInputs(*given[:5]), given[5], *more), *inputs, state, gradients=True
    )


@pytest.mark.parametrize(
    ("time", "starts"),
    [(1, ()), (2, (1,)), (3, ()), (31, (0, 7)), (33, ()), (600, (64, 65, 200, 512, 599))],
)
def test_chunks_equal_the_loop(time: int, starts: Sequence[int]) -> None:
    inputs, state = random_inputs(time, starts)
    expected = outcome(definition, inputs, state)
    for rule in (delta.delta, delta.loop):
        assert_near(outcome(rule, inputs, state), expected, 1e-10)
    for implementation in local(DELTA):
        run = implementation.values[0].run
        assert_near(outcome(run, inputs, state), expected, 1e-10)
        assert_near(run(inputs, state), expected[:2], 1e-10)


@pytest.mark.parametrize("limit", [1e-3, 6.0, 1e6])
def test_a_limit_is_exact_per_token(limit: float) -> None:
    """Where all states, some and none exceed it; the first head has no limit."""
    inputs, state = random_inputs(300, (5, 130))
    limits = torch.tensor([torch.inf, limit, limit, limit], dtype=torch.float64)
    expected = outcome(definition, inputs, state, limits.clamp(max=1e30))
    assert_near(outcome(delta.limited, inputs, state, limits), expected, 1e-10)


def test_negative_eigenvalues_erase_what_a_key_holds_twice() -> None:
    """With β = 2 and no new value, what the memory holds for a unit key is negated."""
    inputs, state = random_inputs(1)
    zeros = torch.zeros_like(inputs.x)
    given = inputs._replace(x=zeros, gain=inputs.gain * 0 + 2, log_decay=inputs.log_decay * 0)
    _, after = delta.delta(given, state)
    key = inputs.B[:, 0].repeat_interleave(2, 1)[..., None]
    torch.testing.assert_close(after @ key, -(state @ key))
