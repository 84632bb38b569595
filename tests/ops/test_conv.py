"""The causal convolution against `torch.nn.functional.conv1d`, at every split."""

from __future__ import annotations

import pytest
import torch
from longrnn.ops.packed_rows import PackedRows
from torch import Tensor
from torch.nn import functional as F

from longrnn.ops.conv import causal_conv
from tests.contracts.builders import generator

CHANNELS = 5


def draw(time: int, width: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, ...]:
    randomness = generator(width)
    shapes = [(2, time, CHANNELS), (CHANNELS, width), (CHANNELS,), (2, width - 1, CHANNELS)]
    return tuple(
        torch.randn(s, generator=randomness, dtype=torch.float64).to(dtype) for s in shapes
    )


@pytest.mark.parametrize("with_bias", [True, False])
@pytest.mark.parametrize("width", [1, 2, 4, 7])
@pytest.mark.parametrize("time", [1, 2, 3, 4, 50])
def test_it_equals_conv1d(time: int, width: int, with_bias: bool) -> None:
    """Also for inputs shorter than the filter; the state holds the tokens before the first."""
    x, weight, bias, state = draw(time, width)
    bias = bias if with_bias else None
    y, after = causal_conv(x, weight, bias, state)
    padded = torch.cat([state, x], 1)
    expected = F.conv1d(padded.mT, weight[:, None], bias, groups=CHANNELS).mT
    torch.testing.assert_close(y, expected, rtol=1e-12, atol=1e-12)
    assert torch.equal(after, padded[:, time:])


@pytest.mark.parametrize("width", [1, 4])
def test_any_split_gives_the_same_bits(width: int) -> None:
    """Parts shorter than the filter, one after another, equal one call bit for bit."""
    x, weight, bias, state = draw(12, width)
    whole, final = causal_conv(x, weight, bias, state)
    pieces = []
    for piece in x.split([1, 1, 2, 7, 1], dim=1):
        y, state = causal_conv(piece, weight, bias, state)
        pieces.append(y)
    assert torch.equal(torch.cat(pieces, 1), whole)
    assert torch.equal(state, final)


@pytest.mark.parametrize("time", [1, 2, 6])
def test_gradients_equal_finite_differences(time: int) -> None:
    """Gradients of outputs and final state w.r.t. all four arguments."""
    arguments = [tensor.requires_grad_() for tensor in draw(time, 4)]
    assert torch.autograd.gradcheck(causal_conv, arguments)


def test_output_has_the_dtype_of_x_and_the_state_keeps_its_own() -> None:
    """bfloat16 inputs give a bfloat16 output and leave a float32 state in float32."""
    x, weight, bias, _ = draw(6, 4, torch.bfloat16)
    y, after = causal_conv(x, weight, bias, torch.zeros(2, 3, CHANNELS))
    assert y.dtype == torch.bfloat16
    assert after.dtype == torch.float32
    assert torch.equal(after, x[:, 3:].float())


def test_the_state_owns_its_memory() -> None:
    """The returned state shares no memory with the input."""
    x, weight, bias, state = draw(6, 4)
    _, after = causal_conv(x, weight, bias, state)
    kept = after.clone()
    x.zero_()
    assert torch.equal(after, kept)
    assert after.untyped_storage().nbytes() == after.numel() * after.itemsize


@pytest.mark.parametrize("with_bias", [True, False])
def test_second_derivatives_equal_finite_differences(with_bias: bool) -> None:
    """The backward pass is differentiable, as Jacobian products require."""
    x, weight, bias, state = (tensor.requires_grad_() for tensor in draw(4, 3))

    def conv(*inputs: Tensor) -> tuple[Tensor, Tensor]:
        x, weight, state, *bias = inputs
        return causal_conv(x, weight, bias[0] if bias else None, state)

    inputs = (x, weight, state, bias) if with_bias else (x, weight, state)
    assert torch.autograd.gradgradcheck(conv, inputs)


def test_second_derivatives_of_packed_rows_equal_finite_differences() -> None:
    """Tokens near the start of a document have their own branch of the graph."""
    x, weight, bias, state = (tensor.requires_grad_() for tensor in draw(5, 3))
    is_start = torch.zeros(x.shape[:2], dtype=torch.bool)
    is_start[0, 1] = is_start[-1, 0] = True
    count = torch.full((len(x),), 5)
    count[-1] = 3
    rows = PackedRows(is_start, count)

    def conv(*inputs: Tensor) -> tuple[Tensor, Tensor]:
        return causal_conv(*inputs, rows=rows)

    assert torch.autograd.gradcheck(conv, (x, weight, bias, state))
    assert torch.autograd.gradgradcheck(conv, (x, weight, bias, state))


def test_narrow_inputs_are_summed_in_float32() -> None:
    """Only the result is rounded: with rounded partial sums, 1 + 256 − 256 would be 0."""
    x = torch.tensor([1.0, 256.0, -256.0, 1.0], dtype=torch.bfloat16).view(1, 4, 1)
    weight = torch.ones(1, 4, dtype=torch.bfloat16)
    y, _ = causal_conv(x, weight, None, torch.zeros(1, 3, 1, dtype=torch.bfloat16))
    assert y.dtype == torch.bfloat16
    assert y.flatten().tolist() == [1.0, 256.0, 1.0, 2.0]
    x, weight, bias, state = (tensor.detach() for tensor in draw(50, 4, torch.bfloat16))
    wide, _ = causal_conv(x.float(), weight.float(), bias.float(), state.float())
    y, _ = causal_conv(x, weight, bias, state)
    assert torch.equal(y, wide.bfloat16())


def test_narrow_gradients_are_summed_in_float32() -> None:
    """Gradients of weights (sums over tokens) and of inputs (sums over taps) are rounded once."""
    narrow = [tensor.detach().requires_grad_() for tensor in draw(200, 4, torch.bfloat16)]
    wide = [tensor.detach().float().requires_grad_() for tensor in narrow]
    ours = torch.autograd.grad(causal_conv(*narrow)[0].float().sum(), narrow)
    theirs = torch.autograd.grad(causal_conv(*wide)[0].sum(), wide)
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other.bfloat16(), rtol=0, atol=0)
