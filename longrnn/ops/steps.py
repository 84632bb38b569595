"""The step sizes of Mamba-2: dt = softplus(raw + bias), within a range."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from longrnn.ops import triton as kernels
from longrnn.ops.again import gradients_of

UNLIMITED = (0.0, math.inf)


def step_sizes(
    raw: Tensor,
    bias: Tensor,
    limit: tuple[float, float],
    dtype: torch.dtype,
    *,
    fused: bool | None = None,
) -> Tensor:
    """softplus(raw + bias), clamped.

    Args:
        raw: `(b, t, h)`.
        bias: `(h,)`.
        limit: least and largest dt; `UNLIMITED` for none.
        dtype: of the result, float32 or float64.
        fused: whether a Triton kernel computes it; see `longrnn.ops.triton.runs`.

    Returns:
        dt `(b, t, h)`.
    """
    if kernels.runs(fused, raw, bias):
        return _Steps.apply(raw, bias, limit, dtype)
    return _in_torch(raw, bias, limit, dtype)


def _in_torch(raw: Tensor, bias: Tensor, limit: tuple[float, float], dtype: torch.dtype) -> Tensor:
    dt = F.softplus(raw.to(dtype) + bias.to(dtype))
    return dt if limit == UNLIMITED else dt.clamp(*limit)


class _Steps(torch.autograd.Function):
    """`step_sizes` in kernels. Keeps raw, a view of what the convolution and the gate keep too."""

    @staticmethod
    def forward(
        ctx: Any, raw: Tensor, bias: Tensor, limit: tuple[float, float], dtype: torch.dtype
    ) -> Tensor:
        from longrnn.ops.triton import steps

        ctx.save_for_backward(raw, bias)
        ctx.limit, ctx.dtype = limit, dtype
        return steps.forward(raw, bias, limit, dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        raw, bias = tensors = ctx.saved_tensors
        if torch.is_grad_enabled():

            def run(raw: Tensor, bias: Tensor) -> Tensor:
                return _in_torch(raw, bias, ctx.limit, ctx.dtype)

            found = gradients_of(run, tensors, ctx.needs_input_grad[:2], (grad,))
        else:
            from longrnn.ops.triton import steps

            found = steps.backward(raw, bias, ctx.limit, grad)
        return *found, None, None
