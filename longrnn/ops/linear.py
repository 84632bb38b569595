"""Matrix products and linear layers, with a faster implementation on some CPUs.

On an x86 CPU, float32 products are computed by oneDNN. torch computes them with MKL, which reaches
half of oneDNN's speed on the AMD processors of `docs/results.md`, because it does not use AVX-512
there. Both sum in float32. Products in bfloat16 are computed in float32 too, where that takes less
time than in torch: without instructions for bfloat16 a third of the time, on some processors with
them 0.6 of it. Each process measures this once for each class of sizes. Without gradients, products
of at most `FEW_ROWS` rows, as in decoding, are computed by a C++ kernel where it was compiled:
decoding is 1.7 to 2.4 times as fast as with the backend `torch` (`docs/results.md`). Other dtypes,
devices and small products use torch's own operators, and so does autocast, which casts them.
"""

import time
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from longrnn.ops.cpu import tokens as cpu
from longrnn.ops.transforms import in_forward_mode, is_transformed

# Fewer rows than this are as fast with MKL; the gradient of the input would be slower.
MIN_ROWS = 32
# At least this many multiplications, since a call of oneDNN costs a few microseconds.
MIN_PRODUCTS = 2**18
# The largest sizes whose time is measured; larger ones have the same ratio of times.
MEASURED_ROWS, MEASURED_WIDTH = 128, 1024


def _available() -> bool:
    capability = torch.backends.cpu.get_cpu_capability()
    built = torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    return built and capability.startswith("AVX")


AVAILABLE = _available()


def matmul_nt(a: Tensor, b: Tensor) -> Tensor:
    """a bᵀ, for `a` `(n, k)` and `b` `(m, k)` with any strides; differentiable any number of times.

    Computed in the dtype of the two, under autocast in its dtype.
    """
    return _product(a, b) if _suits(a, b) else a @ b.t()


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`torch.nn.functional.linear`: x weightᵀ + bias.

    Args:
        x: `(…, k)`.
        weight: `(m, k)`.
        bias: `(m,)` or None.
    """
    if cpu.few_rows_suits(x, weight, bias):
        return cpu.few_rows(x, weight, bias)
    rows = x.flatten(0, -2) if x.ndim > 1 else x
    if x.ndim < 2 or not _suits(rows, weight):
        return F.linear(x, weight, bias)
    # The gradient of a part of wider rows would be 200 times as slow in oneDNN.
    y = _product(rows.contiguous(), weight).view(*x.shape[:-1], len(weight))
    return y if bias is None else y + bias


class Linear(nn.Linear):
    """`torch.nn.Linear`, computed by `linear`."""

    def forward(self, input: Tensor) -> Tensor:
        return linear(input, self.weight, self.bias)


def _suits(a: Tensor, b: Tensor) -> bool:
    """Whether oneDNN computes a bᵀ."""
    return (
        AVAILABLE
        and a.dtype == b.dtype
        and a.dtype in (torch.float32, torch.bfloat16)
        and a.device.type == b.device.type == "cpu"
        and len(a) >= MIN_ROWS
        and a.numel() * len(b) >= MIN_PRODUCTS
        and not torch.is_autocast_enabled("cpu")
        and not in_forward_mode()
        and not torch.compiler.is_compiling()  # Inductor chooses a product itself
        and (a.dtype == torch.float32 or _is_faster_in_float32(*_size_class(a, b)))
    )


def _size_class(a: Tensor, b: Tensor) -> tuple[int, int, int, int]:
    """Rows, columns and inner size of a bᵀ, each rounded to a power of 2, and threads."""
    rows = min(MEASURED_ROWS, 2 ** (len(a).bit_length() - 1))
    columns, inner = (
        min(MEASURED_WIDTH, 2 ** (size.bit_length() - 1)) for size in (len(b), a.shape[1])
    )
    return rows, columns, inner, torch.get_num_threads()


@cache
def _is_faster_in_float32(rows: int, columns: int, inner: int, threads: int) -> bool:
    """Whether a product in bfloat16 takes less time in float32, with both conversions.

    Float32 must save a tenth, so that processes on the same machine choose alike.
    """
    a = torch.ones(rows, inner, dtype=torch.bfloat16, device="cpu")
    b = torch.ones(columns, inner, dtype=torch.bfloat16, device="cpu")
    seconds = {F.linear: [], _Product.forward: []}
    for _ in range(4):  # the first also sets up the kernels
        for product, measured in seconds.items():
            start = time.perf_counter()
            product(a, b)
            measured.append(time.perf_counter() - start)
    return min(seconds[_Product.forward]) < 0.9 * min(seconds[F.linear])


def _product(a: Tensor, b: Tensor) -> Tensor:
    # An autograd function inspects its signature in every call, which takes longer than a small
    # product.
    plain = not is_transformed() and not cpu.tracked((a, b))
    return _Product.forward(a, b) if plain else _Product.apply(a, b)


class _Product(torch.autograd.Function):
    """a bᵀ by oneDNN in float32."""

    @staticmethod
    def forward(a: Tensor, b: Tensor) -> Tensor:
        wide = a.to(torch.float32), b.to(torch.float32)
        return torch.ops.mkldnn._linear_pointwise(*wide, None, "none", [], "").to(a.dtype)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:  # type: ignore[override]
        a, b = ctx.saved_tensors
        wants_a, wants_b = ctx.needs_input_grad
        return (
            matmul_nt(grad, b.t()) if wants_a else None,
            matmul_nt(grad.t(), a.t()) if wants_b else None,
        )
