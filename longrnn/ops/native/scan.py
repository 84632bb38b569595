"""The recurrence in C++: see `scan.h`."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from longrnn.ops.native import KINDS, SEGMENT, call


class Sizes(NamedTuple):
    """b rows, t tokens, h heads, p channels per head, g groups, n numbers of state per channel."""

    b: int
    t: int
    h: int
    p: int
    g: int
    n: int


def scan(
    x: Tensor,
    gain: Tensor,
    log_decay: Tensor,
    B: Tensor,
    C: Tensor,
    state: Tensor,
    *,
    kept: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """h_t = exp(log_decay_t) h_{t−1} + gain_t x_t B_tᵀ, y_t = h_t C_t.

    Args:
        x: `(b, t, h, p)`.
        gain: `(b, t, h)`.
        log_decay: `(b, t, h)`.
        B: `(b, t, g, n)`.
        C: `(b, t, g, n)`.
        state: `(b, h, p, n)`.
        kept: `(segments_of(t), b, h, p, n)`, to which the state after each segment but the last is
            written.

    Returns:
        y `(b, t, h, p)`, and the state after the last token.
    """
    tensors = readable_tokens((x, gain, log_decay, B, C, state))
    y, final = x.new_empty(x.shape), state.new_empty(state.shape)
    kind, _ = KINDS[state.dtype]
    call(f"longrnn_scan_{kind}", scan_arguments(tensors, y, final, kept))
    return y, final


def readable_tokens(tensors: Sequence[Tensor]) -> list[Tensor]:
    """The arguments of `scan` as the kernels read them, copied only where that is necessary.

    All are contiguous, but for x, B and C, of which each token is: they may be parts of one tensor.
    """
    x, gain, log_decay, B, C, state = tensors
    x, B, C = whole_tokens(x), whole_tokens(B), whole_tokens(C)
    if B.stride() != C.stride():
        B, C = B.contiguous(), C.contiguous()
    return [x, gain.contiguous(), log_decay.contiguous(), B, C, state.contiguous()]


def whole_tokens(tensor: Tensor) -> Tensor:
    """A tensor `(b, t, i, j)` of whose tokens each is contiguous, copied only if necessary."""
    return tensor if tensor.stride()[2:] == (tensor.shape[3], 1) else tensor.contiguous()


def scan_arguments(
    tensors: Sequence[Tensor], y: Tensor | None, final: Tensor | None, kept: Tensor | None
) -> Scan:
    """The arguments of a kernel of the recurrence.

    Args:
        tensors: from `readable_tokens`.
        y: contiguous, in the shape of x.
        final: contiguous, in the shape of the state.
        kept: see `scan`.
    """
    x, gain, log_decay, B, C, state = tensors
    addresses = (None if one is None else one.data_ptr() for one in (y, final, kept))
    return Scan(
        *x.shape, *B.shape[2:],
        x.data_ptr(), *x.stride()[:2], gain.data_ptr(), log_decay.data_ptr(),
        B.data_ptr(), C.data_ptr(), *B.stride()[:2], state.data_ptr(), *addresses, SEGMENT,
    )  # fmt: skip


def segments_of(time: int) -> int:
    """How many states `scan` keeps of that many tokens."""
    return (time - 1) // SEGMENT


class Scan(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_long) for name in "bthpgn"),
        ("x", ctypes.c_void_p), ("x_row", ctypes.c_long), ("x_token", ctypes.c_long),
        ("gain", ctypes.c_void_p), ("log_decay", ctypes.c_void_p),
        ("B", ctypes.c_void_p), ("C", ctypes.c_void_p),
        ("bc_row", ctypes.c_long), ("bc_token", ctypes.c_long),
        ("state", ctypes.c_void_p), ("y", ctypes.c_void_p), ("final_state", ctypes.c_void_p),
        ("kept", ctypes.c_void_p), ("segment", ctypes.c_long),
    ]  # fmt: skip
