"""The window as plain recurrences equals its definition, and so do its gradients."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from longrnn.ops.ssd import ScanInputs, chunked
from longrnn.ops.ssd.chunks import Chunk
from longrnn.ops.ssd.window_carry import shape_of
from longrnn.ops.ssd.window_parts import outputs
from tests.contracts.builders import TOLERANCE, assert_near, generator
from tests.ops.test_native_window import definition

# Window, tokens per segment, and tokens: no, one and several segments between; every kind of rest;
# calls that end inside a segment.
CASES = [
    (1, 1, 3),
    (2, 2, 7),
    (3, 2, 9),
    (5, 5, 12),
    (7, 4, 13),
    (8, 4, 16),
    (13, 4, 30),
    (90, 8, 99),
]


def draw(time: int, dtype: torch.dtype = torch.float64) -> ScanInputs:
    """Inputs of two rows, and of four heads in two groups, one of which forgets within tokens."""
    randomness = generator(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(2, time, *shape, generator=randomness, dtype=torch.float64)

    log_decay = -normal(4).square()
    log_decay[..., 0] *= 1e-2
    inputs = normal(4, 3), normal(4), log_decay, normal(2, 5), normal(2, 5)
    return ScanInputs(*(tensor.to(dtype).requires_grad_() for tensor in inputs))


def found_and_wanted(
    inputs: ScanInputs, w: int, segment: int, dtype: torch.dtype = torch.float64
) -> tuple[list[Tensor], list[Tensor]]:
    """Outputs of the tokens after the known ones and gradients, of `outputs` and the definition."""
    shape, first = shape_of(w, segment), known(w, segment)
    y = outputs(Chunk(*inputs[:4]), inputs.C[:, first:], shape, chunked.ssd, dtype)
    exact = ScanInputs(*(tensor.detach().double().requires_grad_() for tensor in inputs))
    wanted = definition(exact, w)[0][:, first:]
    weights = torch.randn(y.shape, generator=generator(5), dtype=torch.float64)
    results = [
        [out, *torch.autograd.grad((out * weights.to(out)).sum(), given)]
        for out, given in ((y, inputs), (wanted, exact))
    ]
    pairs = zip(*results, strict=True)
    return results[0], [one.to(own.dtype) for own, one in pairs]


def known(w: int, segment: int) -> int:
    return (shape_of(w, segment).whole + 1) * segment


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize(("w", "segment", "time"), CASES)
def test_outputs_and_gradients_are_those_of_the_definition(
    w: int, segment: int, time: int, dtype: torch.dtype
) -> None:
    inputs = draw(known(w, segment) + time, dtype)
    names = ("y", *ScanInputs._fields)
    for name, ours, exact in zip(names, *found_and_wanted(inputs, w, segment, dtype), strict=True):
        # A window of one token has no decays, and gradients of 0.
        assert_near(ours, exact, TOLERANCE[dtype], name, scale=1e-3)


def test_narrow_inputs_are_computed_in_the_dtype_of_the_states() -> None:
    inputs = draw(known(13, 4) + 30, torch.float32)
    found, wanted = found_and_wanted(inputs, 13, 4)
    assert found[0].dtype == torch.float64
    assert_near(found[0], wanted[0], TOLERANCE[torch.float64])


@pytest.mark.parametrize("time", [5, 60])
def test_a_call_is_at_most_four_recurrences(time: int) -> None:
    """However long it is, and however many segments lie between."""
    calls = 0

    def counted(inputs: ScanInputs, state: Tensor) -> tuple[Tensor, Tensor]:
        nonlocal calls
        calls += 1
        return chunked.ssd(inputs, state)

    inputs = draw(known(30, 4) + time)
    outputs(
        Chunk(*inputs[:4]), inputs.C[:, known(30, 4) :], shape_of(30, 4), counted, torch.float64
    )
    assert calls == 4


def test_a_decay_to_zero_removes_what_came_before() -> None:
    """In every part of the window; the decay itself has a gradient of 0."""
    inputs = draw(known(13, 4) + 30)
    with torch.no_grad():
        inputs.log_decay[:, [9, 18, 27, 33]] = -torch.inf
        lowest = inputs._replace(log_decay=inputs.log_decay.clamp(min=-1e4).requires_grad_())
    found, _ = found_and_wanted(inputs, 13, 4)
    _, wanted = found_and_wanted(lowest, 13, 4)
    for ours, exact in zip(found, wanted, strict=True):
        assert_near(ours, exact, 1e-10)
