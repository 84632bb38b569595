"""Root-mean-square normalisation, plain and gated.

The backward passes are written by hand: autograd would keep four tensors of the size of the input,
and these keep the input. Of an input that is wider than the result, as the output of the float32
recurrence under autocast, they keep a copy in the dtype of the result.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from longrnn.errors import UserError
from longrnn.ops.again import gradients_of
from longrnn.ops.precision import own_precision
from longrnn.ops.transforms import takes_plain_operations


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / rms(x) · weight over the last axis (arXiv 1910.07467).

    Computed in float32 or wider, returned in the dtype of `x`.
    """
    return _normed(x, None, weight, eps, 1)


def gated_rms_norm(
    x: Tensor,
    gate: Tensor,
    weight: Tensor,
    eps: float,
    groups: int,
    *,
    skip: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """The output norm of Mamba-2: rms_norm(x · silu(gate)), separately for each group of channels.

    Args:
        x: `(b, t, d)`.
        gate: `(b, t, d)`.
        weight: `(d,)`.
        eps: added to the mean square.
        groups: number of groups, a divisor of d.
        skip: values `(b, t, h, p)` and D `(h,)`, whose product is added to x first.
    """
    if skip is not None:
        values, D = skip
        x = torch.addcmul(x.unflatten(-1, values.shape[2:]), values, D[:, None]).flatten(2)
    return _normed(x, gate, weight, eps, groups)


def _normed(x: Tensor, gate: Tensor | None, weight: Tensor, eps: float, groups: int) -> Tensor:
    if torch.is_grad_enabled() and not takes_plain_operations():
        return _Norm.apply(x, gate, weight, eps, groups)
    return _compute(x, gate, weight, eps, groups)[0]


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
    """The norm with a backward pass from its input, the gate and 1 / rms."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        gate: Tensor | None,
        weight: Tensor,
        eps: float,
        groups: int,
    ) -> Tensor:
        y, scale = _compute(x, gate, weight, eps, groups)
        ctx.save_for_backward(x.to(y.dtype), gate, weight, scale)
        ctx.dtype, ctx.eps, ctx.groups = x.dtype, eps, groups
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        x, gate, weight, scale = ctx.saved_tensors
        if torch.is_grad_enabled():
            if x.dtype != ctx.dtype:
                raise UserError(
                    f"the gated norm keeps its {ctx.dtype} input in {x.dtype}, from which second "
                    "derivatives cannot be computed: leave autocast out"
                )

            def run(x: Tensor, gate: Tensor | None, weight: Tensor) -> Tensor:
                return _compute(x, gate, weight, ctx.eps, ctx.groups)[0]

            tensors, wants = (x, gate, weight), ctx.needs_input_grad[:3]
            return *gradients_of(run, tensors, wants, (grad,)), None, None
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
            return grad_inner.to(ctx.dtype), None, grad_weight, None, None
        grad_silu = torch.mul(wide, grad_inner, out=product)
        grad_gate = torch.ops.aten.silu_backward(grad_silu, gate.to(scale.dtype))
        grad_x = grad_inner.mul_(silu).to(ctx.dtype)
        return grad_x, grad_gate.to(gate.dtype), grad_weight, None, None
