"""The norms equal their formulas."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from longrnn.errors import UserError
from longrnn.ops.norm import gated_rms_norm, rms_norm
from tests.contracts.builders import generator

EPS = 1e-3


def draw(*shapes: tuple[int, ...]) -> list[Tensor]:
    randomness = generator(3)
    return [torch.randn(shape, generator=randomness, dtype=torch.float64) for shape in shapes]


def root_mean_square(x: Tensor) -> Tensor:
    return (x.square().mean(-1, keepdim=True) + EPS).sqrt()


def test_rms_norm_equals_its_formula() -> None:
    """x / sqrt(mean(x²) + eps) · weight."""
    x, weight = draw((2, 3, 12), (12,))
    expected = x / root_mean_square(x) * weight
    torch.testing.assert_close(rms_norm(x, weight, EPS), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("groups", [1, 2, 3, 12])
def test_gated_rms_norm_equals_its_formula(groups: int) -> None:
    """Gate, then the norm of each group separately, then the weight."""
    x, gate, weight = draw((2, 3, 12), (2, 3, 12), (12,))
    gated = x * gate * torch.sigmoid(gate)
    slices = [part / root_mean_square(part) for part in gated.split(12 // groups, dim=-1)]
    expected = torch.cat(slices, -1) * weight
    actual = gated_rms_norm(x, gate, weight, EPS, groups)
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)


def test_groups_are_independent() -> None:
    """A large value in one group does not change the other."""
    x, gate, weight = draw((1, 1, 8), (1, 1, 8), (8,))
    larger = x.clone()
    larger[..., :4] *= 100
    before, after = (gated_rms_norm(v, gate, weight, EPS, 2)[..., 4:] for v in (x, larger))
    assert torch.equal(before, after)


def test_norm_of_zero_is_zero() -> None:
    """The norm of a zero vector is zero and not NaN."""
    zero, weight = torch.zeros(1, 1, 4), torch.ones(4)
    assert torch.equal(rms_norm(zero, weight, EPS), zero)
    assert torch.equal(gated_rms_norm(zero, zero, weight, EPS, 2), zero)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_inputs_are_computed_in_float32(dtype: torch.dtype) -> None:
    """Only the result is rounded to the input's dtype; 300² would overflow float16."""
    x, gate, weight = (300 * draw((2, 3, 12))[0]).to(dtype), *draw((2, 3, 12), (12,))
    gate, weight = gate.to(dtype), weight.to(dtype)
    actual = rms_norm(x, weight, EPS)
    assert actual.dtype == dtype
    assert torch.equal(actual, rms_norm(x.float(), weight.float(), EPS).to(dtype))
    actual = gated_rms_norm(x, gate, weight, EPS, 2)
    assert actual.dtype == dtype
    wide = gated_rms_norm(x.float(), gate.float(), weight.float(), EPS, 2)
    assert torch.equal(actual, wide.to(dtype))


@pytest.mark.parametrize("groups", [1, 2])
def test_gradients_equal_finite_differences(groups: int) -> None:
    """Gradients w.r.t. every tensor."""
    arguments = [tensor.requires_grad_() for tensor in draw((1, 2, 4), (1, 2, 4), (4,))]
    assert torch.autograd.gradcheck(lambda x, g, w: gated_rms_norm(x, g, w, EPS, groups), arguments)
    x, _, weight = arguments
    assert torch.autograd.gradcheck(lambda x, w: rms_norm(x, w, EPS), (x, weight))


def test_second_derivatives_of_a_rounded_input_are_refused() -> None:
    """As under autocast, where the output of a float32 recurrence is gated in bfloat16."""
    x, gate, weight = (one.float().requires_grad_() for one in draw((1, 2, 4), (1, 2, 4), (4,)))
    y = gated_rms_norm(x, gate.bfloat16(), weight, EPS, 1).float().square().sum()
    assert torch.autograd.grad(y, x, retain_graph=True)[0].isfinite().all()
    with pytest.raises(UserError, match="autocast"):
        torch.autograd.grad(y, x, create_graph=True)
