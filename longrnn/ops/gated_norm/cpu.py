"""The gated norm in C++."""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from longrnn.ops.cpu import checks
from longrnn.ops.cpu.gradients import Differentiable
from longrnn.ops.cpu.library import call, contiguous_tokens


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
    return {
        **dict(zip("bthp", x.shape, strict=True)),
        "groups": groups,
        "eps": eps,
        "scanned": scanned.to(dtype).contiguous(),
        "x": contiguous_tokens(x, dtype),
        "z": contiguous_tokens(z, dtype),
        "D": D.to(dtype).contiguous(),
        "weight": weight.to(dtype).contiguous(),
    }
