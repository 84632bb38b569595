"""The norms equal their formulas."""

import pytest
import torch
from torch import Tensor

from longrnn.ops.gated_norm import GATED_NORM
from longrnn.ops.gated_norm.definition import gated_rms_norm
from longrnn.ops.norm import rms_norm
from longrnn.ops.operation import Implementation
from tests.backends.test_operations import TOLERANCE, assert_near, local, results
from tests.contracts.builders import generator

EPS = 1e-3


def draw(dtype: torch.dtype = torch.float64, size: float = 1.0) -> list[Tensor]:
    """y, z, x, D and weight of 2 rows, 3 tokens, 4 heads and 3 channels of a head."""
    randomness = generator(3)
    shapes = (2, 3, 4, 3), (2, 3, 12), (2, 3, 4, 3), (4,), (12,)
    drawn = (torch.randn(shape, generator=randomness, dtype=torch.float64) for shape in shapes)
    return [(size * one).to(dtype) for one in drawn]


def by_formula(x: Tensor, weight: Tensor) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + EPS).sqrt() * weight


def test_rms_norm() -> None:
    """x / sqrt(mean(x²) + eps) · weight; 0 for 0."""
    _, x, _, _, weight = draw()
    torch.testing.assert_close(rms_norm(x, weight, EPS), by_formula(x, weight), rtol=1e-12, atol=0)
    assert not rms_norm(0 * x, weight, EPS).any()
    x = x.requires_grad_()
    assert torch.autograd.gradcheck(lambda x, w: rms_norm(x, w, EPS), (x, weight))


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("groups", [1, 2, 3, 12])
@pytest.mark.parametrize("implementation", local(GATED_NORM))
def test_the_gate(implementation: Implementation, groups: int, dtype: torch.dtype) -> None:
    """(y + D x) · silu(z), then the norm of each group separately, then the weight; 0 for 0."""

    def formula(y: Tensor, z: Tensor, x: Tensor, D: Tensor, weight: Tensor) -> list[Tensor]:
        gated = (y + D[:, None] * x).flatten(2) * z * torch.sigmoid(z)
        parts = [by_formula(part, torch.ones(1)) for part in gated.split(12 // groups, dim=-1)]
        return [torch.cat(parts, -1) * weight]

    def run(*tensors: Tensor) -> list[Tensor]:
        return [implementation.run(*tensors, EPS, groups)]

    y, z, x, D, weight = given = draw(dtype)
    exact = results(formula, *(one.double() for one in given), gradients=True)
    assert_near(results(run, *given, gradients=True), exact, TOLERANCE[dtype])
    assert_near(results(run, *given, gradients=False), exact[:1], TOLERANCE[dtype])
    assert not implementation.run(y, 0 * z, x, D, weight, EPS, groups).any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_inputs_are_computed_in_float32(dtype: torch.dtype) -> None:
    """Only the result is rounded to the input's dtype; 300² would overflow float16."""
    narrow = draw(dtype, 300)
    wide = [one.float() for one in narrow]
    actual = rms_norm(narrow[1], narrow[4], EPS)
    assert actual.dtype == dtype
    assert torch.equal(actual, rms_norm(wide[1], wide[4], EPS).to(dtype))
    actual = gated_rms_norm(*narrow, eps=EPS, groups=2)
    assert actual.dtype == dtype
    assert torch.equal(actual, gated_rms_norm(*wide, eps=EPS, groups=2).to(dtype))
