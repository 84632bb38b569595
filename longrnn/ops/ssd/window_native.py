"""One call of the windowed recurrence in C++, with the carry of `longrnn.ops.ssd.window`.

Notable choices:
- The kernel keeps states transposed. The new carry holds views of what it wrote, so that the next
  call copies none of them; the other implementation reads them as any tensors.
"""

from __future__ import annotations

import torch
from torch import Tensor

from longrnn import state as states
from longrnn.ops import native as kernels
from longrnn.ops.native.window import Place, Sums, restored, transposed, windowed_scan
from longrnn.ops.rows import all_finite
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
        None where C++ cannot compute it: for gradients, on other devices, and where y is not
        finite.
    """
    suits = kernels.available() and kernels.suits(carry.back) and kernels.readable(inputs)
    if not suits or shape.chunk > MOST_CHUNK:
        return None
    if torch.is_grad_enabled() and kernels.tracked(
        (*inputs, *(tensor for _, tensor in states.leaves(carry)))
    ):
        return None
    dtype, length, (_, _, heads, p) = carry.back.dtype, shape.chunk, inputs.x.shape
    place = Place(length, shape.rest, shape.between, phase % length, phase // length)
    chunks = _chunks(inputs, carry.current, place.offset)
    complete = (place.offset + inputs.x.shape[1]) // length
    known, kept = [*carry.recent, *chunks], len(carry.recent)
    # Chunk i of the call reads the pair that starts at chunk i of `known`, and itself.
    pieces = [
        tuple(_wide(tensor, dtype) for tensor in chunk) if i <= len(chunks) or i >= kept else None
        for i, chunk in enumerate(known)
    ]
    ends = torch.cat(
        [carry.totals, carry.totals.new_empty(len(carry.totals), len(chunks), heads)], 1
    )
    sums, written = _sums(carry, place, complete)
    y, state = windowed_scan(pieces, inputs.C.to(dtype), place, sums, written, ends, p)
    if not all_finite(y):
        return None
    after = carry._replace(phase=(carry.phase + inputs.x.shape[1]) % shape.block)
    if complete:
        # Kept chunks are shared; new ones are copied, so that the whole input can be freed.
        new = [_copied(chunk) for chunk in known[max(complete, kept) : kept + complete]]
        front = (
            before if tile is None else restored(tile, p)
            for before, tile in zip(carry.front, written, strict=True)
        )
        after = after._replace(
            current=states.tree_map(torch.zeros_like, carry.current),
            recent=(*known[complete:kept], *new),
            totals=ends[:, complete : complete + kept].clone(),
            front=tuple(front),
            back=restored(sums.back, p) if shape.between else carry.back,
            back_decay=sums.back_decay,
        )
    if complete < len(chunks):
        after = after._replace(current=_copied(chunks[-1]))
    return y, state, after


def _chunks(inputs: ScanInputs, current: Chunk, offset: int) -> list[Chunk]:
    """The chunks of a call, in the dtypes of `current`: views, but for those that are not whole."""
    length, time = current.x.shape[1], inputs.x.shape[1]
    pairs = zip(inputs[:4], current, strict=True)
    x, gain, log_decay, B = (tensor.to(like.dtype).contiguous() for tensor, like in pairs)
    inputs = ScanInputs(x, gain, log_decay, B, inputs.C)
    empty = states.tree_map(torch.zeros_like, current)
    chunks, start = [], 0
    while start < time:
        stop = min(time, start + length - offset)
        part = inputs.slice(start, stop)
        whole = stop - start == length
        chunks.append(Chunk(*part[:4]) if whole else fill(current, part, offset))
        current, start, offset = empty, stop, 0
    return chunks


def _sums(carry: WindowCarry, place: Place, complete: int) -> tuple[Sums, list[Tensor | None]]:
    """The sums that the kernel reads, and where it writes the new state of each slot."""
    # An empty carry has the same zeros in every slot.
    unique = {id(state): state for state in carry.front}
    tiles = {key: transposed(state) for key, state in unique.items()}
    back = transposed(carry.back)
    ours = back.data_ptr() != carry.back.data_ptr()
    sums = Sums(
        [tiles[id(state)] for state in carry.front],
        back if ours else back.clone(),
        carry.back_decay.clone(memory_format=torch.contiguous_format),
    )
    wraps = place.slot + complete >= place.between
    written = [
        torch.empty_like(back)
        if complete and (wraps or place.slot <= slot < place.slot + complete)
        else None
        for slot in range(place.between)
    ]
    return sums, written


def _wide(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """A tensor in `dtype` whose rows are contiguous; rows may be apart, as those of a view."""
    tensor = tensor.to(dtype)
    return tensor if tensor[0].is_contiguous() else tensor.contiguous()


def _copied(chunk: Chunk) -> Chunk:
    return states.tree_map(
        lambda tensor: tensor.clone(memory_format=torch.contiguous_format), chunk
    )
