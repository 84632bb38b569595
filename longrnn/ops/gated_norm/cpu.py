"""The gated norm in C++."""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from longrnn.ops.cpu import checks
from longrnn.ops.cpu.gradients import Differentiable
from longrnn.ops.cpu.library import call


def refusal(
    y: Tensor, z: Tensor, x: Tensor, D: Tensor, weight: Tensor, eps: float, groups: int
) -> str | None:
    """Why the kernel cannot compute this call; None if it can."""
    return checks.refusal((y, z, x, D, weight))


def gated_rms_norm(
    y: Tensor, z: Tensor, x: Tensor, D: Tensor, weight: Tensor, eps: float, groups: int
) -> Tensor:
    """See `longrnn.ops.gated_norm.definition.gated_rms_norm`."""
    fields = partial(_fields, eps=eps, groups=groups)

    def run(**tensors: Any) -> Tensor:
        given = fields(**tensors)
        out = torch.empty_like(given["scanned"])
        call("gated_norm", out.dtype, **given, y=out)
        return out.flatten(2).to(z.dtype)

    return Differentiable("gated_norm", fields, run)(scanned=y, z=z, x=x, D=D, weight=weight)


def _fields(
    *, scanned: Tensor, z: Tensor, x: Tensor, D: Tensor, weight: Tensor, eps: float, groups: int
) -> dict[str, Any]:
    """The arguments that the kernel and its gradient share."""
    dtype = torch.promote_types(scanned.dtype, torch.float32)
    b, t, h, p = x.shape
    values, gates = _evenly_spaced(x.flatten(2).to(dtype)), _evenly_spaced(z.to(dtype))
    return {
        "tokens": b * t,
        "h": h,
        "p": p,
        "groups": groups,
        "eps": eps,
        "scanned": scanned.to(dtype).contiguous(),
        "x": values,
        "x_token": values.stride(1),
        "z": gates,
        "z_token": gates.stride(1),
        "D": D.to(dtype).contiguous(),
        "weight": weight.to(dtype).contiguous(),
    }


def _evenly_spaced(wide: Tensor) -> Tensor:
    """`(b, t, d)` with one distance between any two neighbouring tokens."""
    row, token, channel = wide.stride()
    return wide if channel == 1 and row == wide.shape[1] * token else wide.contiguous()
