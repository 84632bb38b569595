"""Root-mean-square normalisation, plain and gated.

The backward passes are written by hand: autograd would keep four tensors of the size of the input,
and these keep the input. Of an input that is wider than the result, as the output of the float32
recurrence under autocast, they keep a copy in the dtype of the result.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional as F

from longrnn.errors import UserError
from longrnn.ops import triton as kernels
from longrnn.ops.again import gradients_of
from longrnn.ops.precision import own_precision
from longrnn.ops.transforms import takes_plain_operations

if TYPE_CHECKING:
    from longrnn.ops.triton.norm import Normed


def rms_norm(x: Tensor, weight: Tensor, eps: float, *, fused: bool | None = None) -> Tensor:
    """x / rms(x) · weight over the last axis (arXiv 1910.07467).

    Computed in float32 or wider, returned in the dtype of `x`. Fused: see `gated_rms_norm`.
    """
    return _normed(x, None, weight, eps, 1, fused)


def add_rms_norm(
    x: Tensor,
    branch: Tensor | None,
    weight: Tensor,
    eps: float,
    *,
    dtype: torch.dtype | None = None,
    fused: bool | None = None,
) -> tuple[Tensor, Tensor]:
    """A residual connection and the norm after it: x + branch, and `rms_norm` of this sum.

    One Triton kernel computes both where it runs. On a GPU a matrix product that adds to x instead
    (`torch.addmm`) would copy x first, and needs both in one dtype, which they do not have under
    autocast or with a residual in float32.

    Args:
        x: `(…, d)`.
        branch: `(…, d)`; None for nothing.
        weight: `(d,)`.
        eps: added to the mean square.
        dtype: of the norm; None for that of the sum.
        fused: see `gated_rms_norm`.
    """
    same = branch is not None and x.shape == branch.shape  # kernels do not broadcast
    if branch is None or not (same and _is_fused(fused, x, branch, weight)):
        total = x if branch is None else x + branch
        normed = rms_norm(total, weight, eps, fused=fused)
        return total, normed if dtype is None else normed.to(dtype)
    dtype = torch.promote_types(x.dtype, branch.dtype) if dtype is None else dtype
    if torch.is_grad_enabled():
        return _AddedNorm.apply(x, branch, weight, eps, dtype)
    from longrnn.ops.triton import residual

    found = residual.forward(x, branch, weight, eps, dtype)
    return found.total, found.y


def gated_rms_norm(
    x: Tensor,
    gate: Tensor,
    weight: Tensor,
    eps: float,
    groups: int,
    *,
    skip: tuple[Tensor, Tensor] | None = None,
    fused: bool | None = None,
) -> Tensor:
    """The output norm of Mamba-2: rms_norm(x · silu(gate)), separately for each group of channels.

    Args:
        x: `(b, t, d)`.
        gate: `(b, t, d)`.
        weight: `(d,)`.
        eps: added to the mean square.
        groups: number of groups, a divisor of d.
        skip: values `(b, t, h, p)` and D `(h,)`, whose product is added to x first.
        fused: whether a Triton kernel computes it; see `longrnn.ops.triton.runs`.
    """
    if skip is None:
        return _normed(x, gate, weight, eps, groups, fused)
    values, D = skip
    if _is_fused(fused, x, gate, weight, values, D):
        return _normed(x, gate, weight, eps, groups, fused, values.flatten(2), D)
    return _normed(_added(x, values.flatten(2), D), gate, weight, eps, groups, fused)


def _normed(
    x: Tensor,
    gate: Tensor | None,
    weight: Tensor,
    eps: float,
    groups: int,
    fused: bool | None,
    skip: Tensor | None = None,
    D: Tensor | None = None,
) -> Tensor:
    if torch.is_grad_enabled() and not takes_plain_operations():
        return _Norm.apply(x, gate, weight, skip, D, eps, groups, fused)
    if _is_fused(fused, x, gate, weight, skip, D):
        return _kernel(x, gate, weight, skip, D, eps, groups, keep=False).y
    return _compute(x, gate, weight, eps, groups)[0]


def _added(x: Tensor, values: Tensor | None = None, D: Tensor | None = None) -> Tensor:
    """x + D values, all `(b, t, d)` but D `(h,)`."""
    if values is None or D is None:
        return x
    by_head, more = (one.unflatten(-1, (len(D), -1)) for one in (x, values))
    return torch.addcmul(by_head, more, D[:, None]).flatten(-2)


def _is_fused(fused: bool | None, x: Tensor, *others: Tensor | None) -> bool:
    return kernels.runs(fused, x, *others) and x.numel() > 0


def _kernel(
    x: Tensor,
    gate: Tensor | None,
    weight: Tensor,
    skip: Tensor | None,
    D: Tensor | None,
    eps: float,
    groups: int,
    *,
    keep: bool,
) -> Normed:
    """The norm in a Triton kernel; `keep` for what the backward pass reads."""
    from longrnn.ops.triton import norm

    dtype = x.dtype if gate is None else gate.dtype
    return norm.forward(x, weight, eps, groups, gate=gate, skip=skip, D=D, dtype=dtype, keep=keep)


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
        skip: Tensor | None,
        D: Tensor | None,
        eps: float,
        groups: int,
        fused: bool | None,
    ) -> Tensor:
        ctx.fused = _is_fused(fused, x, gate, weight, skip, D)
        if ctx.fused:
            # Without a cast, the input itself is kept.
            keep = gate is not None and gate.dtype != x.dtype
            y, scale, total = _kernel(x, gate, weight, skip, D, eps, groups, keep=keep)
            kept = x if total is None else total
        else:
            y, scale = _compute(x, gate, weight, eps, groups)
            kept = x.to(y.dtype)
        ctx.save_for_backward(kept, gate, weight, scale, skip, D)
        ctx.dtype, ctx.eps, ctx.groups = x.dtype, eps, groups
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        x, gate, weight, scale, skip, D = ctx.saved_tensors
        if torch.is_grad_enabled():
            if x.dtype != ctx.dtype:
                raise UserError(
                    f"the gated norm keeps its {ctx.dtype} input in {x.dtype}, from which second "
                    "derivatives cannot be computed: leave autocast out"
                )

            def run(x: Tensor, gate: Tensor | None, weight: Tensor, *skip: Tensor) -> Tensor:
                return _compute(_added(x, *skip), gate, weight, ctx.eps, ctx.groups)[0]

            tensors, wants = (x, gate, weight, skip, D), ctx.needs_input_grad[:5]
            return *gradients_of(run, tensors, wants, (grad,)), None, None, None
        if ctx.fused:
            from longrnn.ops.triton import norm

            options = {"gate": gate, "skip": skip, "D": D, "is_total": x.dtype != ctx.dtype}
            found = norm.backward(x, weight, scale, grad, ctx.groups, **options, dtype=ctx.dtype)
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
            return grad_inner.to(ctx.dtype), None, grad_weight, *[None] * 5
        grad_silu = torch.mul(wide, grad_inner, out=product)
        grad_gate = torch.ops.aten.silu_backward(grad_silu, gate.to(scale.dtype))
        grad_x = grad_inner.mul_(silu).to(ctx.dtype)
        return grad_x, grad_gate.to(gate.dtype), grad_weight, *[None] * 5


class _AddedNorm(torch.autograd.Function):
    """`add_rms_norm` in Triton kernels, with a backward pass from the sum and 1 / rms."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, branch: Tensor, weight: Tensor, eps: float, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        from longrnn.ops.triton import residual

        found = residual.forward(x, branch, weight, eps, dtype)
        ctx.save_for_backward(found.total, weight, found.scale)
        ctx.eps, ctx.dtype, ctx.dtypes = eps, dtype, (x.dtype, branch.dtype)
        # Nothing reads the sum after the last norm: its gradient is not filled with zeros.
        ctx.set_materialize_grads(False)
        return found.total, found.y

    @staticmethod
    def backward(  # type: ignore[override]
        ctx: Any, grad_total: Tensor | None, grad: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        total, weight, scale = ctx.saved_tensors
        if grad is not None and not torch.is_grad_enabled():
            from longrnn.ops.triton import residual

            found = residual.backward(total, weight, scale, grad_total, grad, ctx.dtypes)
            return *found, None, None

        def run(total: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
            return total, rms_norm(total, weight, ctx.eps, fused=False).to(ctx.dtype)

        of_total, of_weight = grad_total, None
        if grad is not None:
            wants = any(ctx.needs_input_grad[:2]), ctx.needs_input_grad[2]
            of_total, of_weight = gradients_of(run, (total, weight), wants, (grad_total, grad))
        parts = (None if of_total is None else of_total.to(one) for one in ctx.dtypes)
        return *parts, of_weight, None, None
