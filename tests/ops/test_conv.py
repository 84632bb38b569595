"""The causal convolution against `torch.nn.functional.conv1d`, at every split."""

from __future__ import annotations

import pytest
import torch
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
def test_against_conv1d(time: int, width: int, with_bias: bool) -> None:
    """Inputs shorter than the filter included, with the tokens before the first in the state."""
    x, weight, bias, state = draw(time, width)
    bias = bias if with_bias else None
    y, after = causal_conv(x, weight, bias, state)
    padded = torch.cat([state, x], 1)
    expected = F.conv1d(padded.mT, weight[:, None], bias, groups=CHANNELS).mT
    torch.testing.assert_close(y, expected, rtol=1e-12, atol=1e-12)
    assert torch.equal(after, padded[:, time:])


@pytest.mark.parametrize("width", [1, 4])
def test_splits(width: int) -> None:
    """Pieces shorter than the filter, fed in turn, equal one call bit for bit."""
    x, weight, bias, state = draw(12, width)
    whole, final = causal_conv(x, weight, bias, state)
    pieces = []
    for piece in x.split([1, 1, 2, 7, 1], dim=1):
        y, state = causal_conv(piece, weight, bias, state)
        pieces.append(y)
    assert torch.equal(torch.cat(pieces, 1), whole)
    assert torch.equal(state, final)


@pytest.mark.parametrize("time", [1, 2, 6])
def test_gradients(time: int) -> None:
    """Of outputs and final state, in all four arguments."""
    arguments = [tensor.requires_grad_() for tensor in draw(time, 4)]
    assert torch.autograd.gradcheck(causal_conv, arguments)


def test_dtypes() -> None:
    """The output follows the input and the state stays what it was."""
    x, weight, bias, _ = draw(6, 4, torch.bfloat16)
    y, after = causal_conv(x, weight, bias, torch.zeros(2, 3, CHANNELS))
    assert y.dtype == torch.bfloat16
    assert after.dtype == torch.float32
    assert torch.equal(after, x[:, 3:].float())


def test_the_state_owns_its_memory() -> None:
    """Writing to the input afterwards does not reach the state."""
    x, weight, bias, state = draw(6, 4)
    _, after = causal_conv(x, weight, bias, state)
    kept = after.clone()
    x.zero_()
    assert torch.equal(after, kept)
    assert after.untyped_storage().nbytes() == after.numel() * after.itemsize


@pytest.mark.parametrize("with_bias", [True, False])
def test_second_derivatives(with_bias: bool) -> None:
    """A backward pass that cannot be differentiated: the diagnosis of gradients multiplies with
    Jacobians that way."""
    x, weight, bias, state = (tensor.requires_grad_() for tensor in draw(4, 3))

    def conv(*inputs: Tensor) -> tuple[Tensor, Tensor]:
        x, weight, state, *bias = inputs
        return causal_conv(x, weight, bias[0] if bias else None, state)

    inputs = (x, weight, state, bias) if with_bias else (x, weight, state)
    assert torch.autograd.gradgradcheck(conv, inputs)


def test_narrow_inputs_are_summed_in_float32() -> None:
    """One rounding of the result and none of the partial sums: 1 + 256 − 256 in bfloat16 is 0."""
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
    """Of the weights, sums over all tokens, and of the inputs, sums over the filter."""
    narrow = [tensor.detach().requires_grad_() for tensor in draw(200, 4, torch.bfloat16)]
    wide = [tensor.detach().float().requires_grad_() for tensor in narrow]
    ours = torch.autograd.grad(causal_conv(*narrow)[0].float().sum(), narrow)
    theirs = torch.autograd.grad(causal_conv(*wide)[0].sum(), wide)
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other.bfloat16(), rtol=0, atol=0)
