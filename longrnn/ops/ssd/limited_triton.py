"""The recurrence with a limit on the norm of the state in Triton kernels, and its gradients.

See `longrnn.ops.ssd.rescale` for the recurrence, `longrnn.ops.triton.limit` for the kernels and
`longrnn.ops.triton.limit_gradient` for those of the backward pass.

Notable choices:
- The backward pass keeps one scale per head and token and the states between segments.
- Rows that a kernel could not compute in float32, or that are not finite, get the gradients of the
  definition in torch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from longrnn.ops import triton as kernels
from longrnn.ops.again import gradients_of
from longrnn.ops.native import tracked
from longrnn.ops.precision import own_precision
from longrnn.ops.rows import run_by_finiteness
from longrnn.ops.ssd import triton
from longrnn.ops.ssd.base import ScanInputs
from longrnn.ops.ssd.triton import FiniteRows, Grads

# inputs, state, limit → y and the final state, in differentiable operations.
Definition = Callable[[ScanInputs, Tensor, Tensor], tuple[Tensor, Tensor]]


def limited_ssd(
    inputs: ScanInputs, state: Tensor, limit: Tensor, unlimited: float, definition: Definition
) -> tuple[Tensor, Tensor] | None:
    """Runs the recurrence with a limit.

    Args:
        inputs: see `ScanInputs`.
        state: `(b, h, p, n)`.
        limit: `(h,)` float64.
        unlimited: limits from here on are none.
        definition: gives the same values.

    Returns:
        y `(b, t, h, p)` and the final state; None where the kernels cannot read the tensors.
    """
    tensors = (*inputs, state)
    if not kernels.suits((*tensors, limit)) or tracked((limit,)):
        return None
    limit = limit.masked_fill(limit >= unlimited, torch.inf).contiguous()
    if not tracked(tensors):
        return tuple(_forward(triton.CHUNK, triton.SEGMENT, limit, tensors, rounded=False)[:2])

    def defined(*tensors: Tensor) -> tuple[Tensor, Tensor]:
        return definition(ScanInputs(*tensors[:-1]), tensors[-1], limit.clamp(max=unlimited))

    return _Limited.apply(triton.CHUNK, triton.SEGMENT, defined, limit, *tensors)[:2]


def _forward(
    chunk: int, segment: int, limit: Tensor, tensors: Sequence[Tensor], *, rounded: bool
) -> Any:
    from longrnn.ops.triton import limited, recurrence

    given = recurrence.operands(*tensors)
    return limited.forward(given, recurrence.plan(given, chunk, segment, rounded=rounded), limit)


class _Limited(torch.autograd.Function):
    """`limited.forward` with `limited_gradient.backward` as its backward pass."""

    @staticmethod
    def forward(
        chunk: int, segment: int, defined: Callable[..., Any], limit: Tensor, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        return tuple(_forward(chunk, segment, limit, tensors, rounded=True))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
        *ctx.sizes, ctx.defined, _, x = inputs[:5]
        _, _, before, scales, again = output
        ctx.mark_non_differentiable(before, scales, again)
        ctx.save_for_backward(*inputs[4:], before, scales)
        ctx.finite = FiniteRows(again, rows=len(x))
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(  # type: ignore[override]
        ctx: Any, grad_y: Tensor | None, grad_final: Tensor | None, *_: None
    ) -> tuple[Tensor | None, ...]:
        *tensors, before, scales = ctx.saved_tensors
        grads, wants = (grad_y, grad_final), ctx.needs_input_grad[4:]
        if grad_y is None and grad_final is None:
            return (None,) * (4 + len(tensors))
        with own_precision(tensors[-1]):
            if torch.is_grad_enabled():
                found = gradients_of(ctx.defined, tensors, wants, grads)
            else:
                found = _gradients(ctx, tensors, before, scales, grads)
        return None, None, None, None, *found


def _gradients(
    ctx: Any, tensors: Sequence[Tensor], before: Tensor, scales: Tensor, grads: Grads
) -> Sequence[Tensor]:
    """The gradients of all tensors, each in its dtype."""
    finite = ctx.finite.wait()
    if bool(finite.all()):
        return _fused_gradients(ctx.sizes, tensors, before, scales, grads)
    y, state = scales.new_zeros(()).expand(tensors[0].shape), tensors[-1]
    filled = [
        torch.zeros_like(like, dtype=state.dtype) if grad is None else grad
        for like, grad in zip((y, state), grads, strict=True)
    ]

    def fused(tensors: Sequence[Tensor], grads: Any, before: Tensor, scales: Tensor) -> Any:
        segments_first = before.transpose(0, 1).contiguous()
        return _fused_gradients(ctx.sizes, tensors, segments_first, scales, grads)

    def by_definition(tensors: Sequence[Tensor], grads: Any, *_: Tensor) -> list[Tensor]:
        leaves = [tensor.detach().requires_grad_() for tensor in tensors]
        with torch.enable_grad():
            outputs = ctx.defined(*leaves)
        return list(torch.autograd.grad(outputs, leaves, grads, materialize_grads=True))

    of_rows = before.transpose(0, 1), scales
    return run_by_finiteness(finite, fused, by_definition, list(tensors), filled, *of_rows)


def _fused_gradients(
    sizes: tuple[int, int], tensors: Sequence[Tensor], before: Tensor, scales: Tensor, grads: Grads
) -> list[Tensor]:
    from longrnn.ops.triton import recurrence
    from longrnn.ops.triton.limited_gradient import backward

    given = recurrence.operands(*tensors)
    how = recurrence.plan(given, *sizes, rounded=True)
    found = backward(given, how, scales, before, *grads)
    return [grad.to(tensor.dtype) for grad, tensor in zip(found, tensors, strict=True)]
