"""The recurrence over the last w inputs in C++: see `longrnn.ops.ssd.window`."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from torch import Tensor
from torch.nn import functional as F

from longrnn.ops import native
from longrnn.ops.native import KINDS, call
from longrnn.ops.native.scan import Sizes, whole_tokens


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
    state = tile.transpose(2, 3)
    return state if tile.shape[3] == p else state[:, :, :p].contiguous()


class Piece(NamedTuple):
    """The inputs of a chunk.

    Attributes:
        inputs: x `(b, t, h, p)`, gain and log_decay `(b, t, h)` and B `(b, t, g, n)`, from
            `readable_inputs`.
        start: the first token of the chunk among the t tokens.
    """

    inputs: tuple[Tensor, ...]
    start: int = 0

    def arguments(self) -> _Piece:
        x, gain, _, B = self.inputs
        size = x.element_size()
        addresses = (one.data_ptr() + self.start * one.stride(1) * size for one in self.inputs)
        return _Piece(*addresses, *x.stride()[:2], gain.stride(0), *B.stride()[:2])


def readable_inputs(inputs: Iterable[Tensor]) -> tuple[Tensor, ...]:
    """The inputs of a piece as the kernel reads them, copied only where that is necessary."""
    x, gain, log_decay, B = inputs
    x, B = whole_tokens(x), whole_tokens(B)
    wanted = (gain.shape[2], 1)
    if gain.stride() != log_decay.stride() or gain.stride()[1:] != wanted:
        gain, log_decay = gain.contiguous(), log_decay.contiguous()
    return x, gain, log_decay, B


def windowed_scan(
    pieces: Sequence[Piece | None],
    C: Tensor,
    place: Place,
    sums: Sums,
    written: Sequence[Tensor | None],
    ends: Tensor,
    p: int,
) -> tuple[Tensor, Tensor]:
    """y and the state of the last token's window.

    Args:
        pieces: the `between + 2` chunks before the call's first one, then the call's chunks. None
            for a chunk of which no window of the call reads inputs.
        C: `(b, t, g, n)`.
        place: see `Place`.
        sums: see `Sums`.
        written: the new state of each slot, to be written; None for slots that the call leaves.
        ends: `(b, len(pieces), h)` float64, log decays of the chunks; those of the call are
            written.
        p: channels per head.
    """
    (b, t, g, n), h = C.shape, ends.shape[2]
    C = whole_tokens(C)
    y, final = C.new_empty(b, t, h, p), C.new_empty(b, h, p, n)
    kind, _ = KINDS[C.dtype]
    front, front_after = _pointers(sums.front), _pointers(written)
    given = (_Piece * len(pieces))(*(one.arguments() if one else _Piece() for one in pieces))
    arguments = _Windowed(
        *Sizes(b, t, h, p, g, n), *place,
        ctypes.addressof(given), C.data_ptr(), *C.stride()[:2],
        ctypes.addressof(front), ctypes.addressof(front_after),
        sums.back.data_ptr(), sums.back_decay.data_ptr(), ends.data_ptr(),
        y.data_ptr(), final.data_ptr(),
    )  # fmt: skip
    call(f"longrnn_windowed_scan_{kind}", arguments)
    return y, final


def _pointers(tensors: Sequence[Tensor | None]) -> ctypes.Array[ctypes.c_void_p]:
    pointers = (None if tensor is None else tensor.data_ptr() for tensor in tensors)
    return (ctypes.c_void_p * len(tensors))(*pointers)


class _Piece(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("x", "gain", "log_decay", "B")),
        *((name, ctypes.c_long) for name in ("x_row", "x_token", "gain_row", "B_row", "B_token")),
    ]


class _Windowed(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_long) for name in (*"bthpgn", *Place._fields)),
        *((name, ctypes.c_void_p) for name in ("pieces", "C")),
        ("C_row", ctypes.c_long), ("C_token", ctypes.c_long),
        *((name, ctypes.c_void_p) for name in ("front", "front_after")),
        *((name, ctypes.c_void_p) for name in ("back", "back_decay", "ends", "y", "final_state")),
    ]  # fmt: skip
