"""k passes over the same inputs at the cost of one."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from longrnn.ops.ssd import ScanInputs, reference
from longrnn.ops.ssd.repeat import repeated
from torch import Tensor

from tests.contracts.builders import generator


def problem(time: int, decay: float, seed: int) -> tuple[ScanInputs, Tensor]:
    source = generator(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(2, *shape, generator=source, dtype=torch.float64)

    inputs = ScanInputs(
        x=normal(time, 4, 3),
        gain=normal(time, 4),
        log_decay=-decay * normal(time, 4).abs(),
        B=normal(time, 2, 5),
        C=normal(time, 2, 5),
    )
    return inputs, normal(4, 3, 5)


def read(inputs: ScanInputs, state: Tensor, times: int) -> Tensor:
    for _ in range(times):
        state = reference.ssd(inputs, state)[1]
    return state


@settings(max_examples=30, deadline=None)
@given(
    time=st.integers(1, 9),
    times=st.lists(st.integers(1, 20), min_size=2, max_size=2),
    decay=st.sampled_from([0.0, 1e-9, 1e-3, 1.0, 30.0]),
    seed=st.integers(0, 100),
)
def test_equals_reading_again(time: int, times: list[int], decay: float, seed: int) -> None:
    """State and gradients, each row with its own number of passes."""
    inputs, before = problem(time, decay, seed)
    leaves = [inputs.x, inputs.gain, inputs.log_decay, inputs.B, before]
    for leaf in leaves:
        leaf.requires_grad_()
    rows = [
        read(ScanInputs(*(part[r : r + 1] for part in inputs)), before[r : r + 1], times[r])
        for r in range(2)
    ]
    expected = torch.cat(rows)
    after = reference.ssd(inputs, before)[1]
    found = repeated(before, after, inputs.log_decay.sum(1), torch.tensor(times))
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)
    weights = torch.randn(found.shape, generator=generator(seed), dtype=torch.float64)
    ours = torch.autograd.grad((found * weights).sum(), leaves)
    theirs = torch.autograd.grad((expected * weights).sum(), leaves)
    for one, other in zip(ours, theirs, strict=True):
        # Where nothing decays, log_decay stands at its bound, and only its gradient is cut off.
        if decay > 0 or one is not ours[2]:
            # The derivative of (1 − a^k) / (1 − a) divides rounding errors by 1 − a, here 1e-10.
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


def test_many_passes_in_float32() -> None:
    """A million passes with a leak far below the rounding of 1 − a."""
    before = torch.ones(1, 1, 1, 1)
    after = before * (1 - 1e-9) + 1e-6
    found = repeated(before, after, torch.full((1, 1), -1e-9), torch.tensor([1_000_000]))
    expected = 1 - 1e-3 + 1.0  # exp(−1e-3) + 1e6 · 1e-6, to 1e-3
    assert abs(float(found) - expected) < 0.06
