"""Under a limit on the norm of the state, every backend equals a loop over tokens.

Values and gradients, for heads that are at their limit all the time, at times, and never.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from longrnn.ops.ssd import BACKENDS, ScanInputs
from longrnn.ops.ssd.rescale import UNLIMITED, rescaled_ssd
from tests.contracts.builders import DTYPES, assert_near, generator, small_chunks, spec_id
from tests.contracts.limits import limited_loop

pytestmark = pytest.mark.core

every_backend = pytest.mark.parametrize("backend", list(BACKENDS))
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=spec_id)
Scan = Callable[[ScanInputs, Tensor], tuple[Tensor, Tensor]]
LIMITS = torch.tensor([0.5, 2.0, 6.0, UNLIMITED], dtype=torch.float64)
NAMES = ("y", "final", *ScanInputs._fields, "state")
TOLERANCE = {torch.float64: 1e-10, torch.float32: 2e-5}


def draw(time: int, dtype: torch.dtype = torch.float64, *, groups: int = 2) -> list[Tensor]:
    """x, gain, log_decay, B, C and a state; a document begins at the third token."""
    randomness = generator(2)

    def normal(*shape: int) -> Tensor:
        return torch.randn(2, *shape, generator=randomness, dtype=torch.float64).clamp(-3, 3)

    fields = normal(time, 4, 3), normal(time, 4), -0.1 * normal(time, 4).square()
    fields[2][:, 2:3] = -torch.inf
    tensors = [*fields, normal(time, groups, 5), normal(time, groups, 5), normal(4, 3, 5)]
    return [tensor.to(dtype) for tensor in tensors]


def outcome(run: Scan, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Outputs, final state, and the gradients of a random functional of both."""
    leaves = [tensor.clone().requires_grad_() for tensor in tensors]
    y, final = run(ScanInputs(*leaves[:-1]), leaves[-1])
    randomness = generator(4)
    weights = [torch.randn(part.shape, generator=randomness).to(part) for part in (y, final)]
    loss = (y * weights[0]).sum() + (final * weights[1]).sum()
    return [y, final, *torch.autograd.grad(loss, leaves)]


def limited(backend: str, sizes: Sequence[int], limits: Tensor = LIMITS) -> Scan:
    """The recurrence in pieces of some lengths."""

    def run(inputs: ScanInputs, state: Tensor) -> tuple[Tensor, Tensor]:
        outputs = []
        for piece in zip(*(tensor.split(list(sizes), 1) for tensor in inputs), strict=True):
            y, state = rescaled_ssd(ScanInputs(*piece), state, limits, BACKENDS[backend])
            outputs.append(y)
        return torch.cat(outputs, 1), state

    return run


def assert_as_the_loop(
    backend: str, tensors: list[Tensor], sizes: Sequence[int], limits: Tensor = LIMITS
) -> None:
    wide = [tensor.double() for tensor in tensors]
    theirs = outcome(lambda inputs, state: limited_loop(inputs, state, limits), wide)
    ours = outcome(limited(backend, sizes, limits), tensors)
    dtype = tensors[-1].dtype
    for name, one, other in zip(NAMES, ours, theirs, strict=True):
        assert one.dtype == dtype, name
        assert_near(one, other, TOLERANCE[dtype], name)


@every_backend
@every_dtype
@pytest.mark.parametrize("sizes", [[1], [21], [1, 7, 13], [66]], ids=str)
def test_every_split_equals_the_loop(backend: str, dtype: torch.dtype, sizes: list[int]) -> None:
    """Gradients through carried states too."""
    with small_chunks(16, 1):
        assert_as_the_loop(backend, draw(sum(sizes), dtype), sizes)


@every_backend
@pytest.mark.parametrize("groups", [1, 4])
def test_groups_of_a_limited_recurrence(backend: str, groups: int) -> None:
    """Head i reads B and C of group i // (h / g)."""
    with small_chunks(16, 1):
        assert_as_the_loop(backend, draw(18, groups=groups), [18])


@every_backend
@pytest.mark.parametrize("size", [1e13, 1e19])
def test_gradients_of_large_inputs_equal_the_loop(backend: str, size: float) -> None:
    """Where float32 could not hold the squares."""
    tensors = draw(10)
    tensors[0] *= size
    theirs = outcome(lambda inputs, state: limited_loop(inputs, state, LIMITS), tensors)
    ours = outcome(limited(backend, [10]), tensors)
    for name, one, other in zip(NAMES, ours, theirs, strict=True):
        # A state at its limit keeps its norm, so that terms of size 1 cancel in that of the gain.
        assert_near(one, other, 1e-9, name, scale=1.0 if name == "gain" else 1e-12)


def test_the_limits_are_reached_at_times() -> None:
    """Each head of the tests above is rescaled as often as its limit is meant to be."""
    tensors = draw(66)
    inputs, state = ScanInputs(*tensors[:-1]), tensors[-1]
    reached = torch.zeros(4)
    for t in range(66):
        _, state = limited_loop(inputs.slice(t, t + 1), state, LIMITS)
        norms = state.flatten(2).norm(dim=-1)
        reached += (norms >= (1 - 1e-12) * LIMITS).float().mean(0) / 66
    assert reached[0] > 0.9
    assert 0.2 < reached[1] < 0.9
    assert 0 < reached[2] < 0.5
    assert reached[3] == 0
