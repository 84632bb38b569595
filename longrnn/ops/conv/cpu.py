"""The causal convolution in C++, with its gradient, which cannot itself be differentiated."""

from typing import Any

import torch
from torch import Tensor

from longrnn.ops.conv import definition
from longrnn.ops.cpu import checks
from longrnn.ops.cpu.checks import refuse_second_derivatives, tracked
from longrnn.ops.cpu.library import call
from longrnn.ops.rows import Rows


def refusal(
    x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor, rows: Rows | None = None
) -> str | None:
    """Why the kernel cannot compute this call; None if it can."""
    return checks.refusal((x, weight, bias, state)) or checks.taps_refusal(weight.shape[1])


def conv(
    x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor, rows: Rows | None = None
) -> tuple[Tensor, Tensor]:
    """See `longrnn.ops.conv.definition.conv`, which computes packed rows."""
    if rows is not None:
        return definition.conv(x, weight, bias, state, rows)
    if tracked((x, weight, bias, state)):
        return _Conv.apply(x, weight, bias, state)
    return _conv(x, weight, bias, state)


def _fields(x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor) -> dict[str, Any]:
    """The arguments that the kernel and its gradient share."""
    dtype = torch.promote_types(torch.promote_types(x.dtype, weight.dtype), torch.float32)
    wide = x.to(dtype)
    wide = wide if wide.stride(2) == 1 else wide.contiguous()
    return {
        **dict(zip("btck", (*x.shape, weight.shape[1]), strict=True)),
        "x_row": wide.stride(0),
        "x_token": wide.stride(1),
        "x": wide,
        "before": state.to(dtype).contiguous(),
        "weight": weight.t().to(dtype).contiguous(),
        "bias": None if bias is None else bias.to(dtype).contiguous(),
    }


def _conv(x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor) -> tuple[Tensor, Tensor]:
    fields = _fields(x, weight, bias, state)
    wide, before = fields["x"], fields["before"]
    y = torch.empty_like(wide, memory_format=torch.contiguous_format)
    after = before.clone()
    call("convolution", wide.dtype, **fields, y=y, after=after)
    return y.to(x.dtype), after.to(state.dtype)


class _Conv(torch.autograd.Function):
    """`_conv` with its backward pass."""

    @staticmethod
    def forward(ctx: Any, *given: Any) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(*given)
        return _conv(*given)

    @staticmethod
    def backward(  # type: ignore[override]
        ctx: Any, grad_y: Tensor, grad_after: Tensor
    ) -> tuple[Tensor | None, ...]:
        refuse_second_derivatives()
        given = ctx.saved_tensors
        fields = _fields(*given)
        dtype = fields["x"].dtype
        grads = [
            None if tensor is None else tensor.new_empty(tensor.shape, dtype=dtype)
            for tensor in given
        ]
        grad_x, grad_weight, grad_bias, grad_before = grads
        call(
            "convolution_gradient",
            dtype,
            **fields,
            grad_y=grad_y.to(dtype).contiguous(),
            grad_after=grad_after.to(dtype).contiguous(),
            grad_x=grad_x,
            grad_before=grad_before,
            grad_weight=grad_weight,
            grad_bias=grad_bias,
        )
        pairs = zip(grads, given, strict=True)
        return tuple(None if grad is None else grad.to(tensor.dtype) for grad, tensor in pairs)
