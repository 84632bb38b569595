"""Root-mean-square normalisation, plain and gated.

The backward passes are written by hand: autograd would keep four tensors of the size of the input,
and these keep the input. Of an input that is wider than the result, as the output of the float32
recurrence under autocast, they keep a copy in the dtype of the result.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._C._functorch import maybe_current_level  # pyright: ignore[reportMissingImports]
from torch.nn import functional as F

from longrnn.ops import triton as kernels
from longrnn.ops.again import gradients_of
from longrnn.ops.precision import own_precision


def rms_norm(x: Tensor, weight: Tensor, eps: float, *, fused: bool | None = None) -> Tensor:
    """x / rms(x) · weight over the last axis (arXiv 1910.07467).

    Computed in float32 or wider, returned in the dtype of `x`. Fused: see `gated_rms_norm`.
    """
    return _normed(x, None, weight, eps, 1, fused)


def gated_rms_norm(
    x: Tensor,
    gate: Tensor,
    weight: Tensor,
    eps: float,
    groups: int,
    *,
    fused: bool | None = None,
) -> Tensor:
    """The output norm of Mamba-2: rms_norm(x · silu(gate)), separately for each group of channels.

    Args:
        x: `(b, t, d)`.
        gate: `(b, t, d)`.
        weight: `(d,)`.
        eps: added to the mean square.
        groups: number of groups, a divisor of d.
        fused: whether a Triton kernel computes it; see `longrnn.ops.triton.runs`.
    """
    return _normed(x, gate, weight, eps, groups, fused)


def _normed(
    x: Tensor, gate: Tensor | None, weight: Tensor, eps: float, groups: int, fused: bool | None
) -> Tensor:
    # torch.func transforms differentiable operations only.
    if torch.is_grad_enabled() and maybe_current_level() is None:
        return _Norm.apply(x, gate, weight, eps, groups, fused)
    return _forward(x, gate, weight, eps, groups, fused)[0]


def _is_fused(fused: bool | None, x: Tensor, gate: Tensor | None, weight: Tensor) -> bool:
    return kernels.runs(fused, x, gate, weight) and x.numel() > 0


def _forward(
    x: Tensor, gate: Tensor | None, weight: Tensor, eps: float, groups: int, fused: bool | None
) -> tuple[Tensor, Tensor]:
    """The norm, and 1 / rms per token and group."""
    if not _is_fused(fused, x, gate, weight):
        return _compute(x, gate, weight, eps, groups)
    from longrnn.ops.triton import norm

    dtype = x.dtype if gate is None else gate.dtype
    y, scale, _ = norm.forward(x, weight, eps, groups, gate=gate, dtype=dtype)
    return y, scale.view(*x.shape[:-1], groups, 1)


def _compute(
    x: Tensor, gate: Tensor | None, weight: Tensor, eps: float, groups: int
) -> tuple[Tensor, Tensor]:
    """The norm in differentiable operations, and 1 / rms per token and group."""
    dtype = torch.promote_types(x.dtype, torch.float32)
    wide = x.to(dtype) if gate is None else x.to(dtype) * F.silu(gate.to(dtype))
    grouped = wide.unflatten(-1, (groups, -1))
    scale = grouped.square().mean(-1, keepdim=True).add(eps).rsqrt()
    normed = (grouped * scale).flatten(-2) * weight
    return normed.to(x.dtype if gate is None else gate.dtype), scale


class _Norm(torch.autograd.Function):
    """`_compute` with a backward pass from x, gate and 1 / rms."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        gate: Tensor | None,
        weight: Tensor,
        eps: float,
        groups: int,
        fused: bool | None,
    ) -> Tensor:
        y, scale = _forward(x, gate, weight, eps, groups, fused)
        ctx.save_for_backward(x.to(y.dtype), gate, weight, scale)
        ctx.dtype, ctx.eps, ctx.groups = x.dtype, eps, groups
        ctx.fused = _is_fused(fused, x, gate, weight)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        x, gate, weight, scale = ctx.saved_tensors
        if torch.is_grad_enabled():

            def run(x: Tensor, gate: Tensor | None, weight: Tensor) -> Tensor:
                return _compute(x, gate, weight, ctx.eps, ctx.groups)[0]

            tensors, wants = (x.to(ctx.dtype), gate, weight), ctx.needs_input_grad[:3]
            return *gradients_of(run, tensors, wants, (grad,)), None, None, None
        if ctx.fused:
            from longrnn.ops.triton import norm

            found = norm.backward(x, weight, scale, grad, ctx.groups, gate=gate, dtype=ctx.dtype)
            return *found, None, None, None
        wide, grad = x.to(scale.dtype), grad.to(scale.dtype)
        silu = None if gate is None else F.silu(gate.to(scale.dtype))
        inner = wide if silu is None else wide * silu
        product = grad * inner
        by_group = product.unflatten(-1, (ctx.groups, -1))
        # One product of a matrix and a vector per group: Σ over tokens of grad · inner / rms.
        with own_precision(product):
            grad_weight = torch.einsum("...gk,...gi->gk", by_group, scale).flatten()
        cross = (by_group * weight.view(ctx.groups, -1)).sum(-1, keepdim=True)
        cross = cross * scale.pow(3) / -by_group.shape[-1]
        grad_inner = (grad * weight).unflatten(-1, (ctx.groups, -1)).mul_(scale)
        grad_inner = grad_inner.addcmul_(inner.unflatten(-1, (ctx.groups, -1)), cross).flatten(-2)
        grad_weight = grad_weight.to(weight.dtype)
        if gate is None or silu is None:
            return grad_inner.to(ctx.dtype), None, grad_weight, None, None, None
        grad_silu = torch.mul(wide, grad_inner, out=product)
        grad_gate = torch.ops.aten.silu_backward(grad_silu, gate.to(scale.dtype))
        grad_x = grad_inner.mul_(silu).to(ctx.dtype)
        return grad_x, grad_gate.to(gate.dtype), grad_weight, None, None, None
