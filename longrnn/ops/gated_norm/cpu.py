"""The gated norm in C++, without gradients."""

from __future__ import annotations

import torch
from torch import Tensor

from longrnn.ops.cpu import checks
from longrnn.ops.cpu.library import call
from longrnn.ops.gated_norm import definition


def refusal(
    y: Tensor, z: Tensor, x: Tensor, D: Tensor, weight: Tensor, eps: float, groups: int
) -> str | None:
    """Why the kernel cannot compute this call; None if it can."""
    return checks.refusal((y, z, x, D, weight))


def gated_rms_norm(
    y: Tensor, z: Tensor, x: Tensor, D: Tensor, weight: Tensor, eps: float, groups: int
) -> Tensor:
    """See `longrnn.ops.gated_norm.definition.gated_rms_norm`, which computes gradients."""
    if checks.tracked((y, z, x, D, weight)):
        return definition.gated_rms_norm(y, z, x, D, weight, eps, groups)
    dtype = torch.promote_types(y.dtype, torch.float32)
    (b, t, h, p), scanned = x.shape, y.to(dtype).contiguous()
    values, gates = _evenly_spaced(x.flatten(2).to(dtype)), _evenly_spaced(z.to(dtype))
    out = torch.empty_like(scanned)
    call(
        "gated_norm",
        dtype,
        tokens=b * t,
        h=h,
        p=p,
        groups=groups,
        eps=eps,
        scanned=scanned,
        x=values,
        x_token=values.stride(1),
        z=gates,
        z_token=gates.stride(1),
        D=D.to(dtype).contiguous(),
        weight=weight.to(dtype).contiguous(),
        y=out,
    )
    return out.flatten(2).to(z.dtype)


def _evenly_spaced(wide: Tensor) -> Tensor:
    """`(b, t, d)` with one distance between any two neighbouring tokens."""
    row, token, channel = wide.stride()
    return wide if channel == 1 and row == wide.shape[1] * token else wide.contiguous()
