"""Products of few rows in C++, which decoding consists of."""

from __future__ import annotations

import ctypes

import pytest
import torch
from torch import Tensor

from longrnn.ops import native
from longrnn.ops.linear import linear
from tests.contracts.builders import assert_near, generator
from tests.ops.test_native import library, needs_kernels

__all__ = ["library"]  # a fixture


def draw_few(
    rows: int, m: int, k: int, dtype: torch.dtype, *, bias: bool = False
) -> tuple[Tensor, Tensor, Tensor | None]:
    """x, weight and bias of a product of few rows."""
    randomness = generator(3)
    shapes = ((rows, k), (m, k), (m,))
    x, weight, added = (torch.randn(shape, generator=randomness).to(dtype) for shape in shapes)
    return x, weight, added if bias else None


# The width of one step of the kernel, less, more, and with a remainder.
FEW = [(1, 9, 1), (2, 7, 31), (3, 5, 32), (4, 130, 65), (1, 64, 200)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", FEW, ids=str)
def test_products_of_few_rows_are_summed_in_float32(
    library: ctypes.CDLL, shape: tuple[int, int, int], dtype: torch.dtype
) -> None:
    """The result is that of float64, rounded once to the dtype of x."""
    x, weight, bias = draw_few(*shape, dtype, bias=True)
    assert bias is not None
    y = native.few_rows(x, weight, bias)
    wanted = x.double() @ weight.double().t() + bias.double()
    assert y.dtype == dtype
    assert_near(y.double(), wanted, 1e-6 if dtype == torch.float32 else torch.finfo(dtype).eps / 2)
    torch.testing.assert_close(y.double(), wanted, rtol=torch.finfo(dtype).eps, atol=2e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_every_number_of_16_bits_is_read_exactly(library: ctypes.CDLL, dtype: torch.dtype) -> None:
    """Denormal numbers, zeros, infinities and NaN included, in both halves of a word."""
    numbers = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    for place in (0, 1, 64):  # the last is a remainder
        weight = torch.zeros(len(numbers), 65, dtype=dtype)
        weight[:, place] = numbers
        x = torch.ones(1, 65, dtype=dtype)
        y = native.few_rows(x, weight, None)[0]
        assert torch.equal(y.isnan(), numbers.isnan())
        known = ~numbers.isnan()
        assert torch.equal(y[known], numbers[known])


@needs_kernels
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_linear_reads_few_rows_with_the_kernel_unless_a_gradient_is_needed(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []
    original = native.few_rows
    monkeypatch.setattr(native, "few_rows", lambda *a: calls.append(a) or original(*a))
    x, weight, bias = draw_few(4, 256, 64, dtype, bias=True)
    y = linear(x[None], weight, bias)
    assert len(calls) == 1
    assert y.shape == (1, 4, 256)
    tracked = linear(x, weight.clone().requires_grad_(), bias)
    assert tracked.requires_grad
    linear(x.repeat(2, 1), weight, bias)
    with torch.autocast("cpu", torch.bfloat16):
        linear(x, weight, bias)
    mapped = torch.vmap(lambda row: linear(row[None], weight, bias))(x)
    assert len(calls) == 1, "only few rows without gradients, autocast and transforms"
    tolerance = 4 * torch.finfo(dtype).eps
    assert_near(mapped[:, 0].double(), y[0].double(), tolerance)
    with pytest.raises(RuntimeError, match="shapes"):
        linear(x[:, :-1], weight, bias)
