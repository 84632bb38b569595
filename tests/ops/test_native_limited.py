"""The recurrence with a limit on the norm of its state in C++, beside a loop over tokens."""

from __future__ import annotations

import ctypes
import math

import pytest
import torch
from longrnn.ops.native.limited import limited_scan
from longrnn.ops.ssd import BACKENDS, ScanInputs, chunked, native, reference
from longrnn.ops.ssd.rescale import UNLIMITED, rescaled_ssd, scale_of
from torch import Tensor

from tests.contracts.builders import assert_near
from tests.ops.test_native import SHAPES, draw, library, needs_kernels, threads

__all__ = ["library", "threads"]  # fixtures

# Of the norm of a typical state: nearly every token rescaled, some, and few of them.
LIMITS = [0.02, 0.5, 1.5]


def limits(shape: tuple[int, ...], factor: float) -> Tensor:
    """The limit of each head; the last of several heads has none."""
    limit = torch.full((shape[2],), factor * math.sqrt(shape[3] * shape[5]), dtype=torch.float64)
    if shape[2] > 2:
        limit[-1] = UNLIMITED
    return limit


def loop(inputs: ScanInputs, state: Tensor, limit: Tensor) -> tuple[Tensor, Tensor]:
    """The definition: every state is computed, measured and scaled."""
    outputs = []
    for token in inputs.tokens():
        _, state = reference.ssd(token, state)
        state = state * scale_of(limit[:, None, None], state, (2, 3))
        outputs.append((state @ token.per_head(token.C)[:, 0, :, :, None])[..., 0])
    return torch.stack(outputs, dim=1), state


@pytest.mark.parametrize("factor", LIMITS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_compiled_library_gives_the_definition(
    library: ctypes.CDLL, shape: tuple[int, ...], factor: float
) -> None:
    inputs, state = draw(*shape)
    limit = limits(shape, factor)
    wanted = loop(inputs, state, limit)
    for dtype, tolerance in ((torch.float64, 1e-12), (torch.float32, 3e-6)):
        tensors = tuple(tensor.to(dtype) for tensor in (*inputs, state))
        found = limited_scan(tensors, limit, UNLIMITED)
        assert found is not None
        for ours, exact in zip(found, wanted, strict=True):
            assert_near(ours.double(), exact, tolerance)


@needs_kernels
def test_products_of_scales_that_leave_the_range_of_float64_divide_a_chunk() -> None:
    """Inputs that grow by a factor of a million per token, each scaled down to the limit."""
    inputs, state = draw(1, 80, 2, 3, 1, 5)
    growth = torch.tensor([1e6, 1e-6], dtype=torch.float64).repeat(40)[None, :, None]
    inputs = inputs._replace(
        gain=inputs.gain * growth, log_decay=torch.zeros_like(inputs.log_decay)
    )
    limit = torch.full((2,), 1e-3, dtype=torch.float64)
    found = limited_scan((*inputs, state), limit, UNLIMITED)
    assert found is not None
    for ours, exact in zip(found, loop(inputs, state, limit), strict=True):
        assert_near(ours, exact, 1e-10)


@needs_kernels
@pytest.mark.usefixtures("threads")
def test_any_split_and_number_of_threads_gives_the_same_states() -> None:
    shape = (2, 300, 5, 3, 1, 5)
    inputs, state = draw(*shape)
    limit = limits(shape, 0.5)
    wanted = limited_scan((*inputs, state), limit, UNLIMITED)
    assert wanted is not None
    for count, sizes in ((1, [1, 62, 130, 107]), (2, [300]), (3, [64, 64, 172])):
        torch.set_num_threads(count)
        outputs, after = [], state
        for piece in zip(*(tensor.split(sizes, dim=1) for tensor in inputs), strict=True):
            found = limited_scan((*piece, after), limit, UNLIMITED)
            assert found is not None
            outputs.append(found[0])
            after = found[1]
        assert_near(torch.cat(outputs, dim=1), wanted[0], 1e-12)
        assert_near(after, wanted[1], 1e-12)


@needs_kernels
@pytest.mark.parametrize(
    "change",
    [
        lambda inputs: inputs._replace(x=inputs.x * 1e25),
        lambda inputs: inputs._replace(B=inputs.B * 1e10),
        lambda inputs: inputs._replace(x=inputs.x.index_fill(1, torch.tensor([40]), math.nan)),
        lambda inputs: inputs._replace(log_decay=inputs.log_decay + 0.1),
    ],
    ids=["large x", "large B", "NaN", "a decay above 1"],
)
def test_what_leaves_the_range_of_float32_is_computed_as_by_chunked(change) -> None:
    wide, start = draw(2, 90, 4, 3, 2, 5)
    inputs = change(ScanInputs(*(tensor.float() for tensor in wide)))
    state, limit = start.float(), torch.ones(4, dtype=torch.float64)
    assert native.limited(inputs, state, limit, UNLIMITED) is None
    ours = rescaled_ssd(inputs, state, limit, BACKENDS["native"])
    theirs = rescaled_ssd(inputs, state, limit, chunked.ssd)
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5, equal_nan=True)


@needs_kernels
def test_gradients_are_those_of_the_parts() -> None:
    inputs, state = draw(1, 70, 3, 3, 1, 5)
    limit, found = torch.ones(3, dtype=torch.float64), []
    for backend in ("native", "chunked"):
        leaves = [tensor.clone().requires_grad_() for tensor in (*inputs, state)]
        y, final = rescaled_ssd(ScanInputs(*leaves[:5]), leaves[5], limit, BACKENDS[backend])
        found.append(torch.autograd.grad(y.square().sum() + final.sum(), leaves))
    for ours, theirs in zip(*found, strict=True):
        assert_near(ours, theirs, 1e-10)
