"""Matrix products and linear layers, with a faster implementation on a CPU where there is one.

On an x86 CPU, float32 products are computed by oneDNN. torch computes them with MKL, which reaches
half of oneDNN's speed on the AMD processors of `benchmarks/results/training_cpu.md`, because it
does not use AVX-512 there. Both sum in float32. Without gradients, products of at most
`native.FEW_ROWS` rows, as in decoding, are computed by a C++ kernel where it was compiled: a token
took 0.57 to 0.71 of the time with torch's products (`benchmarks/results/peers_cpu.md`). Other
dtypes, devices and small products use torch's own operators, and so does autocast, which casts
them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from longrnn.errors import UserError
from longrnn.ops import native
from longrnn.ops.native.layer import Stored
from longrnn.ops.transforms import in_forward_mode

# Fewer rows than this are as fast with MKL; the gradient of the input would be slower.
MIN_ROWS = 32
# At least so many multiplications, since a call of oneDNN costs a few microseconds.
MIN_PRODUCTS = 2**18


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


def batched_nt(a: Tensor, b: Tensor) -> Tensor:
    """a bᵀ for each pair of a batch: `(k, n, m)` from `(k, n, …)` and `(k, m, …)`."""
    return matmul_nt(a[0], b[0])[None] if len(a) == 1 else a @ b.mT


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`torch.nn.functional.linear`: x weightᵀ + bias.

    Args:
        x: `(…, k)`.
        weight: `(m, k)`.
        bias: `(m,)` or None.
    """
    if native.few_rows_suits(x, weight, bias):
        return native.few_rows(x, weight, bias)
    rows = x.flatten(0, -2) if x.ndim > 1 else x
    if x.ndim < 2 or not _suits(rows, weight):
        return F.linear(x, weight, bias)
    y = _product(rows, weight).view(*x.shape[:-1], len(weight))
    return y if bias is None else y + bias


class Linear(nn.Linear):
    """`torch.nn.Linear`, computed by `linear`."""

    def forward(self, input: Tensor) -> Tensor:
        return linear(input, self.weight, self.bias)

    def stored(self) -> Stored:
        """The weights as the C++ kernels read them."""
        return Stored(self.weight, self.bias)


class Int8Linear(nn.Module):
    """A linear layer whose weight is stored in 8 bits: half the bytes of bfloat16.

    Each row w of the weight is stored as integers times a scale s: round(w / s) with s = max |w| /
    127. Few rows of x are computed by the C++ kernel from the stored bytes; otherwise x is
    multiplied by the integers, which bfloat16 holds exactly, and the product by the scales. In
    float16, which such products would exceed, x is multiplied by the rounded weight.

    Args:
        source: the layer to quantise.

    Attributes:
        weight: `(m, k)` int8.
        scale: `(m,)` float32.
        bias: that of `source`.
    """

    weight: Tensor
    scale: Tensor

    def __init__(self, source: nn.Linear) -> None:
        super().__init__()
        wide = source.weight.detach().float()
        # A row of zeros stays one.
        scale = wide.abs().amax(1).clamp(min=torch.finfo(torch.float32).tiny) / 127
        self.register_buffer("weight", (wide / scale[:, None]).round().to(torch.int8))
        self.register_buffer("scale", scale)
        self.bias = source.bias
        self.in_features, self.out_features = source.in_features, source.out_features
        self.register_load_state_dict_pre_hook(_refuse_other_dtypes)

    def forward(self, input: Tensor) -> Tensor:
        """As `Linear.forward`.

        Raises:
            UserError: a gradient is needed.
        """
        if native.tracked((input,)):
            raise UserError(
                "weights in int8 are rounded and have no gradients: load the model without "
                'weights="int8"'
            )
        if native.few_rows_suits(input, self.weight, self.bias):
            return native.few_rows(input, *self.stored())
        if input.dtype == torch.float16:
            weight = (self.weight * self.scale[:, None]).to(input.dtype)
            return linear(input, weight, None if self.bias is None else self.bias.to(input.dtype))
        y = linear(input, self.weight.to(input.dtype))
        y = (y * self.scale).to(y.dtype)  # rounding the scale would shift all values of a channel
        return y if self.bias is None else y + self.bias.to(y.dtype)

    def stored(self) -> Stored:
        """The weights as the C++ kernels read them."""
        return Stored(self.weight, self.bias, self.scale)

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        # Casts of a model leave the scales in float32, as they leave the integers.
        scale = self.scale
        super()._apply(fn, recurse)
        self.scale = scale.to(self.weight.device)
        return self

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}"


def _refuse_other_dtypes(
    layer: nn.Module, state_dict: Mapping[str, Tensor], prefix: str, *_: object
) -> None:
    """Refuses a state dict before a weight in it is cut off to integers."""
    given = state_dict.get(f"{prefix}weight")
    if given is not None and given.dtype != torch.int8:
        raise UserError(
            f"{prefix}weight is stored in int8, and the state dict has it as {given.dtype}: load "
            'the weights into a model without weights="int8", and quantise that one'
        )


# Layers with `stored`, which one call of C++ may compute together with what is around them.
NATIVE = (Linear, Int8Linear)


def _suits(a: Tensor, b: Tensor) -> bool:
    """Whether oneDNN computes a bᵀ."""
    return (
        AVAILABLE
        and a.dtype == b.dtype == torch.float32
        and a.device.type == b.device.type == "cpu"
        and len(a) >= MIN_ROWS
        and a.numel() * len(b) >= MIN_PRODUCTS
        and not torch.is_autocast_enabled("cpu")
        and not in_forward_mode()
    )


def _product(a: Tensor, b: Tensor) -> Tensor:
    # An autograd function inspects its signature in every call, which takes longer than a small
    # product.
    plain = native.readable((a, b)) and not native.tracked((a, b))
    return _Product.forward(a, b) if plain else _Product.apply(a, b)


class _Product(torch.autograd.Function):
    """a bᵀ by oneDNN."""

    @staticmethod
    def forward(a: Tensor, b: Tensor) -> Tensor:
        return torch.ops.mkldnn._linear_pointwise(a, b, None, "none", [], "")

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
