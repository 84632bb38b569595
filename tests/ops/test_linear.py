"""Products and linear layers against float64, whatever computes them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from longrnn.ops import linear as module
from longrnn.ops.linear import Linear, linear, matmul_nt
from tests.contracts.builders import assert_near, generator

needs_onednn = pytest.mark.skipif(not module.AVAILABLE, reason="torch has no oneDNN for this CPU")


def draw(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=generator(shape[0])).to(dtype)


@needs_onednn
def test_onednn_computes_large_float32_products() -> None:
    """The fast path is in use, and only for float32 outside autocast."""
    a, b = draw(64, 128), draw(96, 128)
    assert module._suits(a, b)
    assert not module._suits(a.double(), b.double())
    assert not module._suits(a[:8], b)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert not module._suits(a, b)


@pytest.mark.parametrize("rows", [1, 31, 64, 200])
@pytest.mark.parametrize("strided", [False, True])
def test_products_and_gradients_equal_float64(rows: int, strided: bool) -> None:
    """At sizes below and above the limit, with transposed factors."""
    a, b = draw(rows, 130), draw(140, 130)
    if strided:
        a, b = a.t().contiguous().t(), b.t().contiguous().t()
    tensors = [a.requires_grad_(), b.requires_grad_()]
    wide = [tensor.detach().double().requires_grad_() for tensor in tensors]
    y, expected = matmul_nt(*tensors), wide[0] @ wide[1].t()
    assert_near(y, expected, 1e-6)
    weights = draw(rows, 140)
    ours = torch.autograd.grad((y * weights).sum(), tensors)
    theirs = torch.autograd.grad((expected * weights).sum(), wide)
    for one, other in zip(ours, theirs, strict=True):
        assert_near(one, other, 1e-6)


def test_second_derivatives_equal_float64() -> None:
    """The backward pass is itself differentiable."""
    a, b = draw(64, 130).requires_grad_(), draw(140, 130).requires_grad_()

    def second(a: Tensor, b: Tensor) -> tuple[Tensor, ...]:
        (first,) = torch.autograd.grad(matmul_nt(a, b).sin().sum(), a, create_graph=True)
        return torch.autograd.grad(first.square().sum(), (a, b))

    wide = [tensor.detach().double().requires_grad_() for tensor in (a, b)]
    for one, other in zip(second(a, b), second(*wide), strict=True):
        assert_near(one, other, 1e-5)


@pytest.mark.parametrize("shape", [(5,), (1, 5), (3, 70, 128), (0, 3, 128)])
@pytest.mark.parametrize("bias", [False, True])
def test_the_layer_equals_that_of_torch(shape: tuple[int, ...], bias: bool) -> None:
    """Any number of axes, empty batches, with and without bias."""
    x, layer = torch.randn(shape, generator=generator(1)), Linear(shape[-1], 96, bias=bias)
    assert isinstance(layer, nn.Linear)  # adapters replace linear layers
    assert_near(layer(x), F.linear(x, layer.weight, layer.bias), 1e-5)


def test_autocast_casts_the_layer() -> None:
    """Under autocast the result has its dtype, as that of `torch.nn.Linear`."""
    layer = Linear(128, 96)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        x = draw(64, 128)
        assert torch.equal(layer(x), F.linear(x, layer.weight, layer.bias))
        assert layer(x).dtype == torch.bfloat16


def test_a_row_that_is_not_finite_stays_alone() -> None:
    """NaN and infinity reach no other row."""
    x, weight = draw(64, 128), draw(96, 128)
    x[3, 5], x[9, 1] = torch.nan, torch.inf
    assert (~linear(x, weight).isfinite()).any(1).nonzero()[:, 0].tolist() == [3, 9]


def test_weights_of_torch_func_are_accepted() -> None:
    """`torch.func.grad` through the layer equals autograd."""
    layer, x = Linear(128, 96, bias=False), draw(64, 128)

    def loss(weights: dict[str, Tensor]) -> Tensor:
        return torch.func.functional_call(layer, weights, (x,)).square().sum()

    weights = {"weight": layer.weight.detach()}
    expected = torch.autograd.grad(layer(x).square().sum(), layer.weight)[0]
    assert_near(torch.func.grad(loss)(weights)["weight"], expected, 1e-6)
