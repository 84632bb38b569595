"""The recurrence over the last w inputs in C++: see `longrnn.ops.ssd.window`."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor
from torch.nn import functional as F

from longrnn.ops import native
from longrnn.ops.native import KINDS, call
from longrnn.ops.native.scan import Sizes


class Place(NamedTuple):
    """Where a call starts, and how its window is cut.

    Attributes:
        chunk: tokens per chunk.
        rest: window modulo chunk.
        between: how many whole chunks lie inside the window of every token.
        offset: tokens in the chunk that is being filled.
        slot: number of that chunk in its block of `between` chunks.
    """

    chunk: int
    rest: int
    between: int
    offset: int
    slot: int


class Sums(NamedTuple):
    """Sums of chunk states, each `(b, h, n, p)` or as `transposed` returns them.

    Attributes:
        front: one per slot; None for slots that the call does not read.
        back: changed in place if a chunk is completed.
        back_decay: `(b, h)` float64, changed as `back` is.
    """

    front: Sequence[Tensor | None]
    back: Tensor
    back_decay: Tensor


def transposed(state: Tensor) -> Tensor:
    """A state `(b, h, p, n)` as the kernel reads it: `(b, h, n, p)`, p up to whole vectors."""
    kernels = native.library()
    assert kernels is not None
    missing = -state.shape[2] % (kernels.longrnn_vector_bytes() // state.element_size())
    tile = state.transpose(2, 3)
    return (F.pad(tile, (0, missing)) if missing else tile).contiguous()


def restored(tile: Tensor, p: int) -> Tensor:
    """The state `(b, h, p, n)` that was `transposed`; a view where nothing was padded."""
    state = tile[..., :p].transpose(2, 3)
    return state if tile.shape[3] == p else state.contiguous()


def windowed_scan(
    pieces: Sequence[tuple[Tensor, ...] | None],
    C: Tensor,
    place: Place,
    sums: Sums,
    written: Sequence[Tensor | None],
    ends: Tensor,
    p: int,
) -> tuple[Tensor, Tensor]:
    """y and the state of the last token's window.

    Args:
        pieces: x `(b, chunk, h, p)`, gain and log_decay `(b, chunk, h)` and B `(b, chunk, g, n)` of
            the `between + 2` chunks before the call's first one, then of the call's chunks. Rows
            are contiguous, and equally far apart in all tensors of a chunk. None for a chunk of
            which no window of the call reads inputs.
        C: `(b, t, g, n)`.
        place: see `Place`.
        sums: see `Sums`.
        written: the new state of each slot, to be written; None for slots that the call leaves.
        ends: `(b, len(pieces), h)` float64, log decays of the chunks; those of the call are
            written.
        p: channels per head.
    """
    (b, t, g, n), h = C.shape, ends.shape[2]
    C = C.contiguous()
    y, final = C.new_empty(b, t, h, p), C.new_empty(b, h, p, n)
    kind, _ = KINDS[C.dtype]
    front, front_after = _pointers(sums.front), _pointers(written)
    given = (_Piece * len(pieces))(*(_piece(piece) for piece in pieces))
    arguments = _Windowed(
        *Sizes(b, t, h, p, g, n), *place,
        ctypes.addressof(given), C.data_ptr(),
        ctypes.addressof(front), ctypes.addressof(front_after),
        sums.back.data_ptr(), sums.back_decay.data_ptr(), ends.data_ptr(),
        y.data_ptr(), final.data_ptr(),
    )  # fmt: skip
    call(f"longrnn_windowed_scan_{kind}", arguments)
    return y, final


def _piece(tensors: tuple[Tensor, ...] | None) -> _Piece:
    if tensors is None:
        return _Piece()
    gain = tensors[1]
    return _Piece(*(tensor.data_ptr() for tensor in tensors), gain.stride(0) // gain.shape[2])


def _pointers(tensors: Sequence[Tensor | None]) -> ctypes.Array[ctypes.c_void_p]:
    pointers = (None if tensor is None else tensor.data_ptr() for tensor in tensors)
    return (ctypes.c_void_p * len(tensors))(*pointers)


class _Piece(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("x", "gain", "log_decay", "B")),
        ("row", ctypes.c_long),
    ]


class _Windowed(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_long) for name in (*"bthpgn", *Place._fields)),
        *((name, ctypes.c_void_p) for name in ("pieces", "C", "front", "front_after")),
        *((name, ctypes.c_void_p) for name in ("back", "back_decay", "ends", "y", "final_state")),
    ]
