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
from longrnn.ops.native.limited import limited_scan
from longrnn.ops.native.scan import scan, segments_of
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
    if kernels.tracked((*inputs, state)):
        y, final, _ = _Scan.apply(*inputs, state)
        return y, final
    return scan(*_wide(inputs, state))


def limited(
    inputs: ScanInputs, state: Tensor, limit: Tensor, unlimited: float
) -> tuple[Tensor, Tensor] | None:
    """The recurrence with a limit on the norm of each head's state, in C++.

    Returns None where C++ cannot compute it: for gradients, on other devices, and where the square
    of a value leaves the range of float32.

    Args:
        inputs: see `ScanInputs`.
        state: `(b, h, p, n)`.
        limit: `(h,)`.
        unlimited: a limit from which on a head has none.
    """
    suits = kernels.available() and kernels.suits(state) and kernels.readable((*inputs, limit))
    if not suits or kernels.tracked((*inputs, state, limit)):
        return None
    return limited_scan(_wide(inputs, state), limit, unlimited)


def _wide(inputs: ScanInputs, state: Tensor) -> tuple[Tensor, ...]:
    """Inputs and state in the dtype of the state, in which `chunked` computes too."""
    return *(tensor.to(state.dtype) for tensor in inputs), state


class _Scan(torch.autograd.Function):
    """`scan`, and the states that its backward pass needs."""

    @staticmethod
    def forward(
        x: Tensor, gain: Tensor, log_decay: Tensor, B: Tensor, C: Tensor, state: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        kept = state.new_empty(segments_of(x.shape[1]), *state.shape)
        inputs = ScanInputs(x, gain, log_decay, B, C)
        return *scan(*_wide(inputs, state), kept=kept), kept

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, ...]) -> None:
        ctx.save_for_backward(*inputs, output[2])
        ctx.mark_non_differentiable(output[2])
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(  # type: ignore[override]
        ctx: Any, grad_y: Tensor | None, grad_final: Tensor | None, _: None
    ) -> tuple[Tensor | None, ...]:
        *tensors, kept = ctx.saved_tensors
        if grad_y is None and grad_final is None:
            return (None,) * len(tensors)
        if torch.is_grad_enabled():

            def run(*tensors: Tensor) -> tuple[Tensor, Tensor]:
                return chunked.ssd(ScanInputs(*tensors[:5]), tensors[5])

            return gradients_of(run, tensors, ctx.needs_input_grad, (grad_y, grad_final))
        inputs, state = ScanInputs(*tensors[:5]), tensors[5]
        if grad_y is None:
            grad_y = torch.zeros_like(inputs.x, dtype=state.dtype)
        found = scan_gradients(_wide(inputs, state), kept, grad_y, grad_final)
        return tuple(grad.to(one.dtype) for grad, one in zip(found, tensors, strict=True))
