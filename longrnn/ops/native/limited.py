"""The recurrence with a limit on the norm of its state, in C++: see `longrnn.ops.ssd.rescale`."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from longrnn.ops.native import KINDS, call
from longrnn.ops.native.scan import Scan, readable_tokens, scan_arguments


def limited_scan(
    tensors: Sequence[Tensor], limit: Tensor, unlimited: float
) -> tuple[Tensor, Tensor] | None:
    """y and the final state; None where squares would leave the range of float32.

    Args:
        tensors: the arguments of `longrnn.ops.native.scan.scan`, in one dtype.
        limit: `(h,)` float64.
        unlimited: a limit from which on a head has none.
    """
    tensors = readable_tokens(tensors)
    x, *_, state = tensors
    limit = limit.to(torch.float64).contiguous()
    y, final = x.new_empty(x.shape), state.new_empty(state.shape)
    scan = scan_arguments(tensors, y, final, None)
    arguments = _Limited(scan, limit.data_ptr(), unlimited)
    found = call(f"longrnn_limited_scan_{KINDS[state.dtype][0]}", arguments)
    return (y, final) if found else None


class _Limited(ctypes.Structure):
    _fields_ = [("of", Scan), ("limit", ctypes.c_void_p), ("unlimited", ctypes.c_double)]
