"""The causal convolution against `torch.nn.functional.conv1d`, at every split."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from longrnn.ops.conv import CONV
from longrnn.ops.conv.definition import conv
from longrnn.ops.operation import Implementation
from longrnn.ops.rows import Rows
from tests.backends.test_operations import TOLERANCE, local
from tests.contracts.builders import assert_near, generator

CHANNELS = 21  # whole vectors and a remainder
every_implementation = pytest.mark.parametrize("implementation", local(CONV))


def draw(time: int, width: int, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """Input, weight, bias and state."""
    randomness = generator(width)
    shapes = [(2, time, CHANNELS), (CHANNELS, width), (CHANNELS,), (2, width - 1, CHANNELS)]
    return [torch.randn(s, generator=randomness, dtype=torch.float64).to(dtype) for s in shapes]


@every_implementation
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("with_bias", [True, False])
@pytest.mark.parametrize("width", [1, 2, 4, 7])
@pytest.mark.parametrize("time", [1, 2, 3, 4, 50])
def test_it_equals_conv1d(
    implementation: Implementation, time: int, width: int, with_bias: bool, dtype: torch.dtype
) -> None:
    """Also for inputs shorter than the filter; the state holds the tokens before the first."""
    x, weight, bias, state = leaves = [each.requires_grad_() for each in draw(time, width, dtype)]
    given = bias if with_bias else None
    y, after = implementation.run(x, weight, given, state)
    padded = torch.cat([state, x], 1)
    expected = F.silu(F.conv1d(padded.mT, weight[:, None], given, groups=CHANNELS).mT)
    assert_near(y, expected, TOLERANCE[dtype])
    assert torch.equal(after, padded[:, time:])
    pairs = [(y, after), (expected, padded[:, time:])]
    losses = [first.square().sum() + second.square().sum() for first, second in pairs]
    ours, wanted = (torch.autograd.grad(loss, leaves, materialize_grads=True) for loss in losses)
    for one, other in zip(ours, wanted, strict=True):
        assert_near(one, other, TOLERANCE[dtype])
    assert after.untyped_storage().nbytes() == after.numel() * after.itemsize  # not the input's
    state = state.detach()
    for number, piece in enumerate(x.split([1] * time, dim=1)):
        found, state = implementation.run(piece, weight, given, state)
        assert_near(found, y[:, number : number + 1], TOLERANCE[dtype])
    assert torch.equal(state, after)


@pytest.mark.parametrize("packed", [False, True])
def test_first_and_second_derivatives_equal_finite_differences(packed: bool) -> None:
    """Of outputs and final state, w.r.t. all four arguments; Jacobian products need the second."""
    arguments = [tensor.requires_grad_() for tensor in draw(5, 3)]
    starts, is_token = (torch.zeros(2, 5, dtype=torch.bool) for _ in "ab")
    starts[0, 1] = starts[1, 0] = is_token[0] = True
    is_token[1, :3] = True
    rows = Rows(is_token, starts) if packed else None

    def call(*tensors: Tensor) -> tuple[Tensor, Tensor]:
        return conv(*tensors, rows=rows)

    assert torch.autograd.gradcheck(call, arguments, fast_mode=True)
    assert torch.autograd.gradgradcheck(call, arguments, fast_mode=True)


def test_narrow_inputs_are_summed_in_float32() -> None:
    """With rounded partial sums, 1 + 256 − 256 would be 0."""
    x = torch.tensor([1.0, 256.0, -256.0, 1.0], dtype=torch.bfloat16).view(1, 4, 1)
    weight = torch.ones(1, 4, dtype=torch.bfloat16)
    y, _ = conv(x, weight, None, torch.zeros(1, 3, 1, dtype=torch.bfloat16))
    assert torch.equal(y.flatten(), F.silu(torch.tensor([1.0, 257.0, 1.0, 2.0])).bfloat16())
    narrow = [tensor.requires_grad_() for tensor in draw(200, 4, torch.bfloat16)]
    wide = [tensor.detach().float().requires_grad_() for tensor in narrow]
    ours, theirs = (
        torch.autograd.grad(conv(one[0], one[1], one[2], one[3])[0].float().sum(), one)
        for one in (narrow, wide)
    )
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other.bfloat16(), rtol=2**-7, atol=2**-7)
    x, weight, bias, _ = draw(6, 4, torch.bfloat16)
    y, after = conv(x, weight, bias, torch.zeros(2, 3, CHANNELS))
    assert (y.dtype, after.dtype) == (torch.bfloat16, torch.float32)
