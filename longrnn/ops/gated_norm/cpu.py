"""The gated norm in C++, with its gradient, which cannot itself be differentiated."""

from typing import Any

import torch
from torch import Tensor

from longrnn.ops.cpu import checks
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
    if checks.tracked((y, z, x, D, weight)):
        return _GatedNorm.apply(y, z, x, D, weight, eps, groups)
    return _gated_norm(y, z, x, D, weight, eps, groups)


def _fields(
    y: Tensor, z: Tensor, x: Tensor, D: Tensor, weight: Tensor, eps: float, groups: int
) -> dict[str, Any]:
    """The arguments that the kernel and its gradient share."""
    dtype = torch.promote_types(y.dtype, torch.float32)
    b, t, h, p = x.shape
    values, gates = _evenly_spaced(x.flatten(2).to(dtype)), _evenly_spaced(z.to(dtype))
    return {
        "tokens": b * t,
        "h": h,
        "p": p,
        "groups": groups,
        "eps": eps,
        "scanned": y.to(dtype).contiguous(),
        "x": values,
        "x_token": values.stride(1),
        "z": gates,
        "z_token": gates.stride(1),
        "D": D.to(dtype).contiguous(),
        "weight": weight.to(dtype).contiguous(),
    }


def _gated_norm(
    y: Tensor, z: Tensor, x: Tensor, D: Tensor, weight: Tensor, eps: float, groups: int
) -> Tensor:
    fields = _fields(y, z, x, D, weight, eps, groups)
    out = torch.empty_like(fields["scanned"])
    call("gated_norm", out.dtype, **fields, y=out)
    return out.flatten(2).to(z.dtype)


def _evenly_spaced(wide: Tensor) -> Tensor:
    """`(b, t, d)` with one distance between any two neighbouring tokens."""
    row, token, channel = wide.stride()
    return wide if channel == 1 and row == wide.shape[1] * token else wide.contiguous()


class _GatedNorm(torch.autograd.Function):
    """`gated_rms_norm` with its backward pass."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Tensor:
        y, z, x, D, weight, eps, groups = inputs
        ctx.save_for_backward(y, z, x, D, weight)
        ctx.eps, ctx.groups = eps, groups
        return _gated_norm(y, z, x, D, weight, eps, groups)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        checks.refuse_second_derivatives()
        y, z, x, D, weight = ctx.saved_tensors
        fields = _fields(y, z, x, D, weight, ctx.eps, ctx.groups)
        dtype = fields["scanned"].dtype
        given = {"scanned": y, "z": z, "x": x, "D": D, "weight": weight}
        grads = {name: one.new_empty(one.shape, dtype=dtype) for name, one in given.items()}
        call(
            "gated_norm_gradient",
            dtype,
            **fields,
            **{f"grad_{name}": one for name, one in grads.items()},
            grad_y=grad.to(dtype).contiguous(),
        )
        narrow = (one.to(given[name].dtype) for name, one in grads.items())
        return *narrow, None, None
