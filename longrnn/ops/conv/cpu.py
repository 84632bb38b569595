"""The causal convolution in C++, without gradients."""

from __future__ import annotations

import torch
from torch import Tensor

from longrnn.ops.conv import definition
from longrnn.ops.cpu import checks
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
    """See `longrnn.ops.conv.definition.conv`, which computes packed rows and gradients."""
    if rows is not None or checks.tracked((x, weight, bias, state)):
        return definition.conv(x, weight, bias, state, rows)
    dtype = torch.promote_types(torch.promote_types(x.dtype, weight.dtype), torch.float32)
    wide = x.to(dtype)
    wide = wide if wide.stride(2) == 1 else wide.contiguous()
    before, taps = state.to(dtype).contiguous(), weight.t().to(dtype).contiguous()
    y, after = torch.empty_like(wide, memory_format=torch.contiguous_format), before.clone()
    (b, t, c), k = x.shape, weight.shape[1]
    call(
        "convolution",
        dtype,
        b=b,
        t=t,
        c=c,
        k=k,
        x_row=wide.stride(0),
        x_token=wide.stride(1),
        x=wide,
        before=before,
        weight=taps,
        y=y,
        after=after,
        bias=None if bias is None else bias.to(dtype).contiguous(),
    )
    return y.to(x.dtype), after.to(state.dtype)
