"""Gradients of what the C++ kernels compute, from values that the forward pass kept."""

from __future__ import annotations

import ctypes
from typing import NamedTuple

from torch import Tensor

from longrnn.ops.native import KINDS, SEGMENT, Scan, Sizes, call


class ScanGradients(NamedTuple):
    """Gradients of the arguments of `longrnn.ops.native.scan`, in their shapes."""

    x: Tensor
    log_decay: Tensor
    B: Tensor
    C: Tensor
    state: Tensor


def scan_gradients(
    x: Tensor,
    log_decay: Tensor,
    B: Tensor,
    C: Tensor,
    state: Tensor,
    kept: Tensor,
    grad_y: Tensor,
    grad_final: Tensor | None,
) -> ScanGradients:
    """The gradients of `scan`, all tensors in one dtype.

    Args:
        x: and the next four arguments are those of `scan`.
        kept: what `scan` wrote.
        grad_y: `(b, t, h, p)`.
        grad_final: of the state after the last token; None for 0.
    """
    sizes = Sizes(*x.shape, *B.shape[2:])
    given = [part.contiguous() for part in (x, log_decay, B, C, state, grad_y)]
    found = ScanGradients(*(part.new_empty(part.shape) for part in given[:5]))
    if grad_final is not None:
        grad_final = grad_final.contiguous()
    x, log_decay, B, C, state, grad_y = given
    steps = (sizes.h * sizes.p, sizes.g * sizes.n)
    arguments = _ScanGradient(
        Scan(
            *sizes,
            x.data_ptr(), sizes.t * steps[0], steps[0], None, log_decay.data_ptr(),
            B.data_ptr(), C.data_ptr(), sizes.t * steps[1], steps[1],
            state.data_ptr(), None, None, kept.data_ptr(), SEGMENT,
        ),
        grad_y.data_ptr(), None if grad_final is None else grad_final.data_ptr(),
        found.x.data_ptr(), sizes.t * steps[0], steps[0], 0, None, found.log_decay.data_ptr(),
        found.B.data_ptr(), found.C.data_ptr(), sizes.t * steps[1], steps[1],
        found.state.data_ptr(),
    )  # fmt: skip
    call(f"longrnn_scan_gradient_{KINDS[state.dtype][0]}", arguments)
    return found


class _ScanGradient(ctypes.Structure):
    _fields_ = [
        ("of", Scan),
        ("y", ctypes.c_void_p), ("final_state", ctypes.c_void_p),
        ("x", ctypes.c_void_p), ("x_row", ctypes.c_long), ("x_token", ctypes.c_long),
        ("adds_x", ctypes.c_long),
        ("gain", ctypes.c_void_p), ("log_decay", ctypes.c_void_p),
        ("B", ctypes.c_void_p), ("C", ctypes.c_void_p),
        ("bc_row", ctypes.c_long), ("bc_token", ctypes.c_long), ("state", ctypes.c_void_p),
    ]  # fmt: skip
