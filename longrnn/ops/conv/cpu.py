"""The causal convolution in C++."""

from typing import Any

import torch
from torch import Tensor

from longrnn.ops.conv import definition
from longrnn.ops.cpu import checks
from longrnn.ops.cpu.gradients import Differentiable
from longrnn.ops.cpu.library import call, contiguous_tokens
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
    kernel = Differentiable("convolution", _fields, _conv)
    return kernel(x=x, weight=weight, bias=bias, state=state)


def _fields(x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor) -> dict[str, Any]:
    """The arguments that the kernel and its gradient share."""
    dtype = torch.promote_types(torch.promote_types(x.dtype, weight.dtype), torch.float32)
    return {
        **dict(zip("btck", (*x.shape, weight.shape[1]), strict=True)),
        "x": contiguous_tokens(x, dtype),
        "state": state.to(dtype).contiguous(),
        "weight": weight.t().to(dtype).contiguous(),
        "bias": None if bias is None else bias.to(dtype).contiguous(),
    }


def _conv(x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor) -> tuple[Tensor, Tensor]:
    fields = _fields(x, weight, bias, state)
    wide, before = fields["x"], fields["state"]
    y, final_state = wide.new_empty(wide.shape), torch.empty_like(before)
    call("convolution", wide.dtype, **fields, y=y, final_state=final_state)
    return y.to(x.dtype), final_state.to(state.dtype)
