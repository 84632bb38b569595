"""The recurrence in Triton kernels on a GPU: see `longrnn.ops.triton.recurrence`.

Inputs in bfloat16 are multiplied on tensor cores, with computed operands rounded to bfloat16 if a
gradient is needed, and as the sum of two bfloat16 numbers otherwise. The state and the decays are
float32. Inputs in other dtypes are computed in the dtype of the state.

Tensors that the kernels cannot read, such as those on other devices, are computed by `chunked`,
which gives the same values to rounding.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from longrnn.ops import triton as kernels
from longrnn.ops.again import gradients_of
from longrnn.ops.precision import own_precision
from longrnn.ops.rows import run_by_finiteness
from longrnn.ops.ssd import chunked
from longrnn.ops.ssd.base import ScanInputs

CHUNK = 64
SEGMENT = 2048


def ssd(inputs: ScanInputs, state: Tensor) -> tuple[Tensor, Tensor]:
    """See `longrnn.ops.ssd.base.SSD`.

    Raises:
        UserError: this machine cannot run the kernels.
    """
    kernels.require()
    if not kernels.suits((*inputs, state)):
        return chunked.ssd(inputs, state)
    tensors = (*inputs, state)
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
        y, final, *_ = _Recurrence.apply(*tensors)
        return y, final
    from longrnn.ops.triton import recurrence

    given = recurrence.operands(*tensors)
    how = recurrence.plan(given, CHUNK, SEGMENT, rounded=False)
    sequential = inputs.x.shape[1] <= recurrence.MAX_SEQUENTIAL
    y, final, *_ = recurrence.forward(given, how, sequential=sequential)
    return y, final


class _Recurrence(torch.autograd.Function):
    """`recurrence.forward` with `recurrence.backward` as its backward pass."""

    @staticmethod
    def forward(*tensors: Tensor) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
        from longrnn.ops.triton import recurrence

        given = recurrence.operands(*tensors)
        how = recurrence.plan(given, CHUNK, SEGMENT, rounded=True)
        return recurrence.forward(given, how)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: tuple[Any, ...]) -> None:
        _, _, before, trouble = output
        ctx.mark_non_differentiable(*(one for one in (before, trouble) if one is not None))
        ctx.save_for_backward(*inputs, before)
        ctx.sizes = CHUNK, SEGMENT
        ctx.finite = _FiniteRows(trouble, len(inputs[0]))
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(  # type: ignore[override]
        ctx: Any, grad_y: Tensor | None, grad_final: Tensor | None, *_: None
    ) -> tuple[Tensor | None, ...]:
        *tensors, before = ctx.saved_tensors
        grads = grad_y, grad_final
        if grad_y is None and grad_final is None:
            return (None,) * len(tensors)

        def again(tensors: list[Tensor], grads: tuple[Tensor | None, ...]) -> list[Tensor | None]:
            """By autograd, for rows that are not finite and for second derivatives."""
            run = chunked.ssd if torch.is_grad_enabled() else chunked.sequential
            with torch.enable_grad():
                ...

        with own_precision(tensors[-1]):
            ...
