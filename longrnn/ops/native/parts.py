"""What is before and after the recurrence of a Mamba-2 in C++, each by itself: see `parts.h`.

For layers whose recurrence is edited; other layers are computed by `longrnn.ops.native.cell`. Both
functions compute in float32 or wider and round once. They return None where C++ cannot compute a
call: for gradients and on other devices.
"""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

import torch
from torch import Tensor

from longrnn.ops import native
from longrnn.ops.native import KINDS, MOST_TAPS, call


def convolution(
    x: Tensor, weight: Tensor, bias: Tensor | None, before: Tensor
) -> tuple[Tensor, Tensor] | None:
    """`longrnn.ops.conv.causal_conv` with its activation, for rows of one document.

    Args:
        x: `(b, t, c)`.
        weight: `(c, k)`.
        bias: `(c,)` or None.
        before: `(b, k − 1, c)`, the inputs that precede `x`.
    """
    dtype = torch.promote_types(torch.promote_types(x.dtype, weight.dtype), torch.float32)
    given = (x, weight, before) if bias is None else (x, weight, before, bias)
    if weight.shape[1] > MOST_TAPS or not _suits(dtype, *given):
        return None
    (b, t, c), k = x.shape, weight.shape[1]
    wide = x.to(dtype)
    wide = wide if wide.stride(2) == 1 else wide.contiguous()
    taps, inputs = weight.t().to(dtype).contiguous(), before.to(dtype).contiguous()
    wide_bias = None if bias is None else bias.to(dtype).contiguous()
    y, after = wide.new_empty(b, t, c), torch.empty_like(inputs)
    arguments = _Convolution(
        b, t, c, k, wide.data_ptr(), wide.stride(0), wide.stride(1), inputs.data_ptr(),
        taps.data_ptr(), None if wide_bias is None else wide_bias.data_ptr(),
        y.data_ptr(), after.data_ptr(),
    )  # fmt: skip
    call(f"longrnn_convolution_{KINDS[dtype][0]}", arguments)
    return y.to(x.dtype), after.to(before.dtype)


def gated_norm(
    y: Tensor, z: Tensor, x: Tensor, D: Tensor, weight: Tensor, eps: float, groups: int
) -> Tensor | None:
    """rms_norm((y + D x) · silu(z)) · weight, `longrnn.ops.norm.gated_rms_norm`, in z's dtype.

    Args:
        y: `(b, t, h p)`, the output of the recurrence.
        z: `(b, t, h p)`.
        x: `(b, t, h, p)`.
        D: `(h,)`.
        weight: `(h p,)`.
        eps: added to the mean square.
        groups: of the norm, a divisor of h p.
    """
    dtype = torch.promote_types(y.dtype, torch.float32)
    if not _suits(dtype, y, z, x, D, weight):
        return None
    (b, t, h, p), scanned = x.shape, y.to(dtype).contiguous()
    (values, step), (gate, gate_step) = (_tokens(one, dtype) for one in (x.flatten(2), z))
    D, weight = D.to(dtype).contiguous(), weight.to(dtype).contiguous()
    out = torch.empty_like(scanned)
    arguments = _gate_type(KINDS[dtype][1])(
        b * t, h, p, groups, eps, scanned.data_ptr(), values.data_ptr(), gate.data_ptr(),
        step, gate_step, D.data_ptr(), weight.data_ptr(), out.data_ptr(),
    )  # fmt: skip
    call(f"longrnn_gated_norm_{KINDS[dtype][0]}", arguments)
    return out.to(z.dtype)


def _suits(dtype: torch.dtype, *given: Tensor) -> bool:
    """Whether the kernels can compute something of these tensors in `dtype`."""
    known = native.available() and dtype in KINDS
    return known and native.readable(given) and not native.tracked(given)


def _tokens(tensor: Tensor, dtype: torch.dtype) -> tuple[Tensor, int]:
    """A tensor `(b, t, d)` in `dtype`, and the distance between any two neighbouring tokens."""
    wide = tensor.to(dtype)
    row, token, channel = wide.stride()
    if channel == 1 and row == wide.shape[1] * token:
        return wide, token
    return wide.contiguous(), wide.shape[2]


class _Convolution(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_long) for name in "btck"),
        ("x", ctypes.c_void_p), ("x_row", ctypes.c_long), ("x_token", ctypes.c_long),
        *((name, ctypes.c_void_p) for name in ("before", "weight", "bias", "y", "after")),
    ]  # fmt: skip


@cache
def _gate_type(real: Any) -> type[ctypes.Structure]:
    fields = [
        *((name, ctypes.c_long) for name in ("tokens", "h", "p", "groups")), ("eps", real),
        *((name, ctypes.c_void_p) for name in ("scanned", "x", "z")),
        ("x_token", ctypes.c_long), ("z_token", ctypes.c_long),
        *((name, ctypes.c_void_p) for name in ("D", "weight", "y")),
    ]  # fmt: skip
    return type("_Gate", (ctypes.Structure,), {"_fields_": fields})
