"""The recurrence and its gradients in C++ on a CPU, where the kernels were compiled.

Notable choices:
- The backward pass keeps the inputs and one state per segment of `longrnn.ops.native.SEGMENT`
  tokens, and computes all other states again.
- Tensors on other devices, transforms of torch.func and second derivatives are computed by
  `chunked`, which gives the same values to rounding.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from longrnn.errors import UserError
from longrnn.ops import native as kernels
from longrnn.ops.again import gradients_of
from longrnn.ops.native.gradients import scan_gradients
from longrnn.ops.precision import own_precision
from longrnn.ops.rows import all_finite, finite_rows, run_by_finiteness
from longrnn.ops.ssd import chunked
from longrnn.ops.ssd.base import ScanInputs


def ssd(inputs: ScanInputs, state: Tensor) -> tuple[Tensor, Tensor]:
    """See `longrnn.ops.ssd.base.SSD`.

    Raises:
        UserError: the kernels were not compiled.
    """
    if (why := kernels.missing()) is not None:
        raise UserError(f"{why}; or use the backend chunked")
    if not (kernels.suits(state) and kernels.readable(inputs)):
        return chunked.ssd(inputs, state)
    y, final = _scan(inputs, state)
    # The output of a token depends on its whole input and state, so checking it suffices.
    if all_finite(y):
        return y, final
    finite = finite_rows(y)
    if bool(finite.all()):
        return y, final
    with own_precision(state):
        return run_by_finiteness(finite, _scan, chunked.sequential, inputs, state)


def _scan(inputs: ScanInputs, state: Tensor) -> tuple[Tensor, Tensor]:
    """The recurrence for finite inputs and states."""
    if kernels.tracked((*inputs, state)):
        y, final, _ = _Scan.apply(*inputs, state)
        return y, final
    return kernels.scan(*_wide(*inputs, state))


def _wide(
    x: Tensor, log_decay: Tensor, B: Tensor, C: Tensor, state: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The arguments in the dtype of the state, in which the kernels compute, as `chunked` does."""
    dtype = state.dtype
    return x.to(dtype), log_decay.to(dtype), B.to(dtype), C.to(dtype), state


class _Scan(torch.autograd.Function):
    """`kernels.scan`, and the states that its backward pass needs."""

    @staticmethod
    def forward(
        x: Tensor, log_decay: Tensor, B: Tensor, C: Tensor, state: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        kept = state.new_empty(kernels.segments_of(x.shape[1]), *state.shape)
        return *kernels.scan(*_wide(x, log_decay, B, C, state), kept=kept), kept

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, ...]) -> None:
        x, log_decay, B, C, state = inputs
        ctx.dtype = x.dtype
        # As in `chunked`: B and C have the digits of the projections, and x needs no more.
        ctx.save_for_backward(x.to(B.dtype), log_decay, B, C, state, output[2])
        ctx.mark_non_differentiable(output[2])
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(  # type: ignore[override]
        ctx: Any, grad_y: Tensor | None, grad_final: Tensor | None, _: None
    ) -> tuple[Tensor | None, ...]:
        x, log_decay, B, C, state, kept = ctx.saved_tensors
        if grad_y is None and grad_final is None:
            return (None,) * 5
        if torch.is_grad_enabled():

            def run(x: Tensor, *others: Tensor) -> tuple[Tensor, Tensor]:
                return chunked.ssd(ScanInputs(x.to(ctx.dtype), *others[:3]), others[3])

            tensors = (x, log_decay, B, C, state)
            return gradients_of(run, tensors, ctx.needs_input_grad, (grad_y, grad_final))
        if grad_y is None:
            grad_y = torch.zeros_like(x, dtype=state.dtype)
        found = scan_gradients(*_wide(x, log_decay, B, C, state), kept, grad_y, grad_final)
        dtypes = (ctx.dtype, log_decay.dtype, B.dtype, C.dtype, state.dtype)
        return tuple(grad.to(dtype) for grad, dtype in zip(found, dtypes, strict=True))
