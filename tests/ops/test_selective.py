"""The selective scan computes what its loop over tokens does."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from longrnn.ops import cpu
from longrnn.ops.operation import Implementation
from longrnn.ops.scan.definition import ScanInputs
from longrnn.ops.scan.definition import loop as scan_loop
from longrnn.ops.selective import SELECTIVE
from longrnn.ops.selective.definition import SelectiveInputs

TOLERANCE = {torch.float64: 1e-11, torch.float32: 5e-6}
# Rows, tokens, channels, numbers of state per channel, groups: not multiples of a vector's width.
SIZES = [(2, 70, 37, 5, 1), (1, 33, 48, 16, 2), (3, 1, 5, 3, 1), (2, 100, 6, 4, 3)]
IMPLEMENTATIONS = [
    pytest.param(
        implementation,
        id=implementation.name,
        marks=pytest.mark.skipif(cpu.missing() is not None, reason=str(cpu.missing())),
    )
    for implementation in SELECTIVE.implementations
]


def random_inputs(b: int, t: int, h: int, n: int, g: int) -> list[Tensor | None]:
    """Steps from 1e-4 to 100 in any mixture, some infinite, and the state as the last one."""
    draw = partial(torch.randn, generator=torch.Generator().manual_seed(t), dtype=torch.float64)
    size = torch.tensor([1e-4, 1.0, 100.0], dtype=torch.float64)
    step = draw(b, t, h).exp() * size[torch.arange(b * t * h).view(b, t, h) * 7 % 3]
    step[:, 20:21] = torch.inf
    keep = -draw(h).abs() * 0.01 if t % 2 else None
    x, gain, rate = draw(b, t, h), draw(b, t, h).abs(), -draw(h, n).exp()
    return [x, gain, step, rate, keep, draw(b, t, g, n), draw(b, t, g, n), draw(b, h, n)]


def loop(inputs: SelectiveInputs, state: Tensor) -> tuple[Tensor, Tensor]:
    """The recurrence with the decays of all tokens, one token after another."""
    x, gain, step, rate, log_keep, B, C = inputs
    log_decay = step[..., None] * rate
    log_decay = log_decay if log_keep is None else log_decay + log_keep[:, None]
    scan = ScanInputs(x[..., None], gain, log_decay, B, C)
    y, after = scan_loop(scan, state[:, :, None])
    return y[..., 0], after[:, :, 0]


def results(run: Any, tensors: list[Tensor | None]) -> list[Tensor]:
    """Outputs, and the gradients of all tensors but `log_keep`; of finite steps only."""
    given = [None if one is None else one.clone().requires_grad_() for one in tensors]
    y, state = run(SelectiveInputs(*given[:-1]), given[-1])  # type: ignore[arg-type]
    total = (y * torch.arange(y.numel()).view(y.shape).cos().to(y)).sum()
    total = total + (state * torch.arange(state.numel()).view(state.shape).sin().to(y)).sum()
    wanted = [one for number, one in enumerate(given) if number != 4]
    found = list(torch.autograd.grad(total, wanted))  # type: ignore[arg-type]
    found[2] = found[2].masked_fill(tensors[2] == torch.inf, 0)  # type: ignore[arg-type]
    return [y, state, *found]


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_outputs_and_gradients_are_those_of_the_loop(
    implementation: Implementation, sizes: tuple[int, ...], dtype: torch.dtype
) -> None:
    inputs = random_inputs(*sizes)
    narrow = [None if one is None else one.to(dtype) for one in inputs]
    wide = [None if one is None else one.double() for one in narrow]
    exact = results(loop, wide)
    for ours, expected in zip(results(implementation.run, narrow), exact, strict=True):
        if not expected.isfinite().all():  # ∞ · 0 in the gradient of a rate by the loop
            assert ours.isfinite().all()
            continue
        assert (ours.double() - expected).abs().max() <= TOLERANCE[dtype] * expected.abs().max()
