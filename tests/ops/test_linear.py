"""Products and linear layers against float64, whatever computes them."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from longrnn.ops.cpu import missing
from longrnn.ops.cpu import tokens as cpu
from longrnn.ops.linear import Linear, linear, matmul_nt
from tests.contracts.builders import assert_near, generator


def draw(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=generator(shape[0])).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    ("rows", "m", "k"),
    [(1, 257, 65), (2, 300, 31), (3, 500, 32), (4, 130, 165), (8, 257, 65), (9, 300, 64)],
)
@torch.no_grad()
def test_few_rows_are_summed_in_float32(rows: int, m: int, k: int, dtype: torch.dtype) -> None:
    """Without gradients the result is that of float64, rounded once, under vmap too."""
    x, weight, bias = draw(rows, k, dtype=dtype), draw(m, k, dtype=dtype), draw(m, dtype=dtype)
    wanted = x.double() @ weight.double().t() + bias.double()
    mapped = torch.vmap(lambda row: linear(row[None], weight, bias))(x)[:, 0]
    for y in (linear(x, weight, bias), linear(x[None], weight, bias)[0], mapped):
        assert y.dtype == dtype
        assert_near(y.double(), wanted, 4 * torch.finfo(dtype).eps)
    with pytest.raises(RuntimeError):
        linear(x[:, :-1], weight, bias)


@pytest.mark.skipif(missing() is not None, reason=str(missing()))
def test_every_number_of_bfloat16_is_read_exactly() -> None:
    """Denormal numbers, zeros, infinities and NaN included, in both halves of a word."""
    dtype = torch.bfloat16
    numbers = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    for place in (0, 1, 64):  # the last is a remainder
        weight = torch.zeros(len(numbers), 65, dtype=dtype)
        weight[:, place] = numbers
        y = cpu.few_rows(torch.ones(1, 65, dtype=dtype), weight, None)[0]
        assert torch.equal(y.nan_to_num(7), numbers.nan_to_num(7))
        assert torch.equal(y.isnan(), numbers.isnan())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("rows", [1, 31, 64, 200])
def test_products_and_gradients_equal_float64(rows: int, dtype: torch.dtype) -> None:
    """At sizes below and above the limit, with transposed factors; rounded once."""
    a, b = draw(130, rows, dtype=dtype).t(), draw(140, 130, dtype=dtype)
    tolerance = 1e-6 if dtype == torch.float32 else torch.finfo(dtype).eps
    tensors = [a.requires_grad_(), b.requires_grad_()]
    wide = [tensor.detach().double().requires_grad_() for tensor in tensors]
    y, expected = matmul_nt(*tensors), wide[0] @ wide[1].t()
    assert y.dtype == dtype
    assert_near(y.double(), expected, tolerance)
    weights = draw(rows, 140, dtype=dtype)
    ours = torch.autograd.grad((y * weights).sum(), tensors)
    theirs = torch.autograd.grad((expected * weights).sum(), wide)
    for one, other in zip(ours, theirs, strict=True):
        assert_near(one.double(), other, tolerance)


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
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(layer(x), F.linear(x, layer.weight, layer.bias))


def test_a_row_that_is_not_finite_stays_alone() -> None:
    x, weight = draw(64, 128), draw(96, 128)
    x[3, 5], x[9, 1] = torch.nan, torch.inf
    assert (~linear(x, weight).isfinite()).any(1).nonzero()[:, 0].tolist() == [3, 9]
