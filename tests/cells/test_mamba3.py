"""Mamba-3: what its rule approximates, and what its state holds."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import Tensor

from longrnn.cells.edit import Edit
from longrnn.cells.mamba3 import Mamba3, Trapezoid, TrapezoidInputs
from longrnn.cells.recurrence import Memory
from longrnn.ops.scan import SCAN
from tests.contracts.builders import assert_near, generator, random_tree

pytestmark = pytest.mark.core

LIMITS = [None, *(torch.full((3,), norm, dtype=torch.float64) for norm in (torch.inf, 2.0))]


@pytest.mark.parametrize("limit", LIMITS, ids=["plain", "two inputs per token", "limited"])
def test_the_recurrence_is_that_of_the_paper(limit: Tensor | None) -> None:
    """h_t = α_t h_{t−1} + (1 − λ_t) Δ_t α_t u_{t−1} + λ_t Δ_t u_t, whichever way it is computed."""
    draw, time = generator(0), 70
    x, B = (torch.randn(2, time + 1, 3, n, generator=draw, dtype=torch.float64) for n in (4, 5))
    C = torch.randn(2, time, 3, 5, generator=draw, dtype=torch.float64)
    dt, mix = torch.rand(2, 2, time, 3, generator=draw, dtype=torch.float64)
    log_decay = -dt * torch.tensor([1e-3, 0.5, 20])
    h = state = torch.randn(2, 3, 4, 5, generator=draw, dtype=torch.float64)
    u, outputs = x[..., None] * B[..., None, :], []
    for t, (before, now) in enumerate(pairwise(u.unbind(1))):
        alpha, step, share = (one[:, t, :, None, None] for one in (log_decay.exp(), dt, mix))
        h = alpha * h + (1 - share) * step * alpha * before + share * step * now
        if limit is not None:
            h = h * (limit[:, None, None] / h.norm(dim=(2, 3), keepdim=True)).clamp(max=1)
        outputs.append((h @ C[:, t, ..., None])[..., 0])
    inputs = TrapezoidInputs(x, dt, log_decay, B, C, mix)
    y, after = Trapezoid()(inputs, Memory(state, None), Edit(limit=limit), SCAN, "torch")
    assert_near(y, torch.stack(outputs, 1), 1e-11)
    assert_near(after.state, h, 1e-11)


@torch.no_grad()
def test_rotations_make_outputs_depend_on_turns_between_tokens_alone() -> None:
    """A state whose memory, last input and angle are turned together gives the same outputs."""
    torch.manual_seed(0)
    cell = Mamba3(8, 8, d_state=6, head_dim=4, rope_fraction=1.0).double()
    x = torch.randn(1, 9, 8, dtype=torch.float64)
    state = random_tree(cell.init_state(1), 1)
    turn = torch.full_like(state.angle, 0.7)

    def turned(vectors: Tensor, angle: Tensor) -> Tensor:
        pairs = torch.view_as_complex(vectors.unflatten(-1, (-1, 2)).contiguous())
        pairs = pairs * torch.polar(torch.ones_like(angle), angle)
        return torch.view_as_real(pairs).flatten(-2)

    other = state._replace(
        ssm=turned(state.ssm, turn[:, :, None].expand(-1, -1, 4, -1)),
        B=turned(state.B, turn),
        angle=state.angle + turn,
    )
    assert_near(cell(x, other)[0], cell(x, state)[0], 1e-12)
