"""The recurrence in Triton kernels on a GPU: see `longrnn.ops.triton.recurrence`.

Inputs in bfloat16 are multiplied on tensor cores. Operands that a kernel computes are rounded to
bfloat16 if a gradient is needed, and used as the sum of two bfloat16 numbers otherwise. The state
and the decays are float32. Inputs in other dtypes are computed in the dtype of the state.

Tensors that the kernels cannot read, such as those on other devices, are computed by `chunked`,
which gives the same values to rounding.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from longrnn.ops import triton as kernels
from longrnn.ops.again import gradients_of
from longrnn.ops.native import tracked
from longrnn.ops.precision import own_precision
from longrnn.ops.rows import run_by_finiteness
from longrnn.ops.ssd import chunked
from longrnn.ops.ssd.base import ScanInputs

CHUNK = 64
SEGMENT = 2048

Grads = tuple[Tensor | None, Tensor | None]


def ssd(inputs: ScanInputs, state: Tensor) -> tuple[Tensor, Tensor]:
    """See `longrnn.ops.ssd.base.SSD`.

    Raises:
        UserError: this machine cannot run the kernels.
    """
    kernels.require()
    tensors = (*inputs, state)
    if not kernels.suits(tensors):
        return chunked.ssd(inputs, state)
    if tracked(tensors):
        return _Recurrence.apply(CHUNK, SEGMENT, *tensors)[:2]
    from longrnn.ops.triton import recurrence

    given = recurrence.operands(*inputs, state)
    how = recurrence.plan(given, CHUNK, SEGMENT, rounded=False)
    sequential = inputs.x.shape[1] <= recurrence.MAX_SEQUENTIAL
    return recurrence.forward(given, how, sequential=sequential)[:2]


class _Recurrence(torch.autograd.Function):
    """`recurrence.forward` with `recurrence_gradient.backward` as its backward pass."""

    @staticmethod
    def forward(
        chunk: int, segment: int, *tensors: Tensor
    ) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
        from longrnn.ops.triton import recurrence

        given = recurrence.operands(*tensors)
        how = recurrence.plan(given, chunk, segment, rounded=True)
        return recurrence.forward(given, how)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
        *ctx.sizes, x = inputs[:3]
        _, _, before, trouble = output
        ctx.mark_non_differentiable(*(one for one in (before, trouble) if one is not None))
        ctx.save_for_backward(*inputs[2:], before)
        ctx.finite = FiniteRows(trouble, rows=len(x))
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(  # type: ignore[override]
        ctx: Any, grad_y: Tensor | None, grad_final: Tensor | None, *_: None
    ) -> tuple[Tensor | None, ...]:
        *tensors, before = ctx.saved_tensors
        if grad_y is None and grad_final is None:
            return (None,) * (2 + len(tensors))
        with own_precision(tensors[-1]):
            if torch.is_grad_enabled():
                wants = ctx.needs_input_grad[2:]
                found = gradients_of(_chunked, tensors, wants, (grad_y, grad_final))
            else:
                found = _gradients(ctx, tensors, before, (grad_y, grad_final))
        return None, None, *found


def _chunked(*tensors: Tensor) -> tuple[Tensor, Tensor]:
    return chunked.ssd(ScanInputs(*tensors[:-1]), tensors[-1])


def _gradients(
    ctx: Any, tensors: Sequence[Tensor], before: Tensor | None, grads: Grads
) -> Sequence[Tensor]:
    """The gradients of all tensors, each in its dtype."""
    finite = ctx.finite.wait()
    if bool(finite.all()):
        return _fused_gradients(ctx.sizes, tensors, before, grads)
    outputs = (tensors[0].shape, tensors[-1].shape)
    state = tensors[-1]
    filled = [
        state.new_zeros(shape) if grad is None else grad
        for shape, grad in zip(outputs, grads, strict=True)
    ]

    def fused(tensors: Sequence[Tensor], grads: Any) -> list[Tensor]:
        return _fused_gradients(ctx.sizes, tensors, None, grads)

    return run_by_finiteness(finite, fused, _sequential_gradients, list(tensors), filled)


def _fused_gradients(
    sizes: tuple[int, int], tensors: Sequence[Tensor], before: Tensor | None, grads: Grads
) -> list[Tensor]:
    from longrnn.ops.triton import recurrence
    from longrnn.ops.triton.recurrence_gradient import backward

    given = recurrence.operands(*tensors)
    how = recurrence.plan(given, *sizes, rounded=True)
    found = backward(given, how, before, *grads)
    return [grad.to(tensor.dtype) for grad, tensor in zip(found, tensors, strict=True)]


def _sequential_gradients(tensors: Sequence[Tensor], grads: Any) -> list[Tensor]:
    """Through every token, for rows with NaN or infinity."""
    leaves = [tensor.detach().requires_grad_() for tensor in tensors]
    with torch.enable_grad():
        outputs = chunked.sequential(ScanInputs(*leaves[:-1]), leaves[-1])
    return list(torch.autograd.grad(outputs, leaves, grads, materialize_grads=True))


class FiniteRows:
    """Which rows of a batch are finite, read from the GPU without waiting in the forward pass.

    Args:
        trouble: `(b h, …)` int32, not 0 where a head is not finite.
        rows: b.
    """

    def __init__(self, trouble: Tensor, rows: int) -> None:
        finite = (trouble.view(rows, -1) == 0).all(1)
        self._finite = finite.to("cpu", non_blocking=True)
        self._copied = torch.cuda.Event() if finite.is_cuda else None
        if self._copied is not None:
            self._copied.record(torch.cuda.current_stream(finite.device))

    def wait(self) -> Tensor:
        """`(b,)` bool on the CPU; the copy was started long before."""
        if self._copied is not None:
            self._copied.synchronize()
        return self._finite
