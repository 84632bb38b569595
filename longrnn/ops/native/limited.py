"""The recurrence with a limit on the norm of its state, in C++: see `longrnn.ops.ssd.rescale`."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from longrnn.ops.native import KINDS, SEGMENT, Scan, Sizes, call


def limited_scan(
    tensors: tuple[Tensor, ...], limit: Tensor, unlimited: float
) -> tuple[Tensor, Tensor] | None:
    """y and the final state; None where squares would leave the range of float32.

    Args:
        tensors: the arguments of `longrnn.ops.native.scan`, in one dtype.
        limit: `(h,)` float64.
        unlimited: a limit from which on a head has none.
    """
    x, gain, log_decay, B, C, state = (part.contiguous() for part in tensors)
    sizes = Sizes(*x.shape, *B.shape[2:])
    limit = limit.to(torch.float64).contiguous()
    y, final = torch.empty_like(x), torch.empty_like(state)
    steps = (sizes.h * sizes.p, sizes.g * sizes.n)
    arguments = _Limited(
        Scan(
            *sizes,
            x.data_ptr(), sizes.t * steps[0], steps[0], gain.data_ptr(), log_decay.data_ptr(),
            B.data_ptr(), C.data_ptr(), sizes.t * steps[1], steps[1],
            state.data_ptr(), y.data_ptr(), final.data_ptr(), None, SEGMENT,
        ),
        limit.data_ptr(), unlimited,
    )  # fmt: skip
    found = call(f"longrnn_limited_scan_{KINDS[state.dtype][0]}", arguments)
    return (y, final) if found else None


class _Limited(ctypes.Structure):
    _fields_ = [("of", Scan), ("limit", ctypes.c_void_p), ("unlimited", ctypes.c_double)]
