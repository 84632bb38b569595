"""One call of the windowed recurrence in C++, with the carry of `longrnn.ops.ssd.window`.

Notable choices:
- The kernel keeps states transposed. The new carry holds views of what it wrote, so that the next
  call copies none of them; the other implementation reads them as any tensors.
"""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from longrnn import state as states
from longrnn.ops import native as kernels
from longrnn.ops.native.window import (
    Piece,
    Place,
    Sums,
    readable_inputs,
    restored,
    transposed,
    windowed_scan,
)
from longrnn.ops.ssd.base import ScanInputs
from longrnn.ops.ssd.chunks import Chunk, fill
from longrnn.ops.ssd.window_carry import WindowCarry, WindowShape

MOST_CHUNK = 64  # as in tiles.h


def windowed(
    inputs: ScanInputs, carry: WindowCarry, shape: WindowShape, phase: int
) -> tuple[Tensor, Tensor, WindowCarry] | None:
    """The windowed recurrence of rows that are all at one phase.

    Args:
        inputs: see `ScanInputs`.
        carry: see `WindowCarry`.
        shape: see `WindowShape`.
        phase: tokens consumed, modulo the length of a block.

    Returns:
        y `(b, t, h, p)`, the state of the last token's window `(b, h, p, n)`, and the new carry;
        None where C++ cannot compute it: for gradients and on other devices.
    """
    suits = kernels.available() and kernels.suits(carry.back) and kernels.readable(inputs)
    if not suits or shape.chunk > MOST_CHUNK:
        return None
    if torch.is_grad_enabled() and kernels.tracked(
        (*inputs, *(tensor for _, tensor in states.leaves(carry)))
    ):
        return None
    dtype, length, (_, time, heads, p) = carry.back.dtype, shape.chunk, inputs.x.shape
    place = Place(length, shape.rest, shape.between, phase % length, phase // length)
    call = _Call.of(inputs, carry.current, place.offset)
    count, complete = len(call.spans), (place.offset + time) // length
    # Chunk i of the call reads the pair of chunks that starts `between + 2` before it, and itself.
    before = [
        Piece(_readable(chunk, dtype)) if i <= count else None
        for i, chunk in enumerate(carry.recent)
    ]
    ends = torch.cat([carry.totals, carry.totals.new_empty(len(carry.totals), count, heads)], 1)
    sums, written = _sums(carry, place, count, complete)
    pieces = [*before, *call.pieces(dtype)]
    y, state = windowed_scan(pieces, inputs.C.to(dtype), place, sums, written, ends, p)
    after = carry._replace(phase=(carry.phase + time) % shape.block)
    if complete:
        # Kept chunks are shared.
        recent = (*carry.recent, *call.kept(complete, len(carry.recent)))[-len(carry.recent) :]
        after = _moved(after, sums, written, p)._replace(
            recent=recent, totals=ends[:, complete : complete + len(recent)].clone()
        )
    if call.last is not None or place.offset:
        after = after._replace(current=call.last or call.empty)
    return y, state, after


class _Call(NamedTuple):
    """The inputs of a call as chunks.

    Attributes:
        inputs: in the dtypes that a carry keeps.
        spans: the first token of each chunk in the call, and the one after its last.
        filled: the chunks that are not whole in the call, by their number: with the tokens before
            it, or with zeros after it.
        empty: a chunk without tokens.
        last: the last chunk, if it is not complete.
    """

    inputs: Chunk
    spans: list[tuple[int, int]]
    filled: dict[int, Chunk]
    empty: Chunk
    last: Chunk | None

    @classmethod
    def of(cls, inputs: ScanInputs, current: Chunk, offset: int) -> _Call:
        """Cuts the inputs of a call whose first chunk has `offset` tokens in `current`."""
        length, time = current.x.shape[1], inputs.x.shape[1]
        pairs = zip(inputs[:4], current, strict=True)
        x, gain, log_decay, B = (one.to(like.dtype) for one, like in pairs)
        own = ScanInputs(x, gain, log_decay, B, inputs.C)
        starts = [0, *range(length - offset, time, length)]
        spans = list(pairwise([*starts, time]))
        # Without tokens, `current` is empty itself.
        empty = states.tree_map(torch.zeros_like, current) if offset else current
        filled, last = {}, None
        for number, (start, stop) in enumerate(spans):
            first = 0 if number else offset
            if stop - start < length:
                filled[number] = fill(empty if number else current, own.slice(start, stop), first)
                last = filled[number] if first + stop - start < length else None
        return cls(Chunk(*own[:4]), spans, filled, empty, last)

    def pieces(self, dtype: torch.dtype) -> list[Piece]:
        """The chunks as the kernel reads them."""
        inputs = _readable(self.inputs, dtype)
        return [
            Piece(_readable(self.filled[number], dtype))
            if number in self.filled
            else Piece(inputs, start)
            for number, (start, _) in enumerate(self.spans)
        ]

    def kept(self, complete: int, most: int) -> list[Chunk]:
        """The last of the `complete` chunks that are complete, at most `most`.

        They are copied, so that the whole input can be freed.
        """
        chosen = range(max(0, complete - most), complete)
        whole = [number for number in chosen if number not in self.filled]
        copies = [self.filled[number] for number in chosen if number in self.filled]
        if whole:
            span = slice(self.spans[whole[0]][0], self.spans[whole[-1]][1])
            tail = (tensor[:, span].clone() for tensor in self.inputs)
            parts = (tensor.split(self.empty.x.shape[1], dim=1) for tensor in tail)
            copies += [Chunk(*tensors) for tensors in zip(*parts, strict=True)]
        return copies


def _moved(carry: WindowCarry, sums: Sums, written: list[Tensor | None], p: int) -> WindowCarry:
    """A carry with the sums that the kernel wrote."""
    if not written:
        return carry  # without chunks between, no token changes the stacks
    front = (
        before if tile is None else restored(tile, p)
        for before, tile in zip(carry.front, written, strict=True)
    )
    back = restored(sums.back, p)
    return carry._replace(front=tuple(front), back=back, back_decay=sums.back_decay)


def _sums(
    carry: WindowCarry, place: Place, chunks: int, complete: int
) -> tuple[Sums, list[Tensor | None]]:
    """The sums that the kernel reads, and where it writes the new state of each slot."""
    # The end of a block reads and writes all slots.
    wraps, slot = place.slot + complete >= place.between, place.slot
    read = range(place.between) if wraps else range(slot, slot + chunks)
    new = range(place.between) if wraps else range(slot, slot + complete)
    # An empty carry has the same zeros in every slot.
    unique = {id(carry.front[i]): carry.front[i] for i in read}
    tiles = {key: transposed(state) for key, state in unique.items()}
    back, back_decay = transposed(carry.back), carry.back_decay.contiguous()
    if complete:  # the kernel changes them
        back, back_decay = back.clone(), back_decay.clone()
    written = [torch.empty_like(back) if i in new else None for i in range(place.between)]
    return Sums([tiles.get(id(state)) for state in carry.front], back, back_decay), written


def _readable(chunk: Chunk, dtype: torch.dtype) -> tuple[Tensor, ...]:
    return readable_inputs(tensor.to(dtype) for tensor in chunk)
