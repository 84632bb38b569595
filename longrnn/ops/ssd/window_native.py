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
        _wide(chunk, dtype) if i <= len(chunks) or i >= kept else None
        for i, chunk in enumerate(known)
    ]
    ends = torch.cat(
        [carry.totals, carry.totals.new_empty(len(carry.totals), len(chunks), heads)], 1
    )
    sums, written = _sums(carry, place, len(chunks), complete)
    y, state = windowed_scan(pieces, inputs.C.to(dtype), place, sums, written, ends, p)
    if not all_finite(y):
        return None
    after = carry._replace(phase=(carry.phase + inputs.x.shape[1]) % shape.block)
    if complete:
        # Kept chunks are shared; new ones are copied, so that the whole input can be freed.
        new = [_copied(chunk) for chunk in known[max(complete, kept) : kept + complete]]
        after = _moved(after, sums, written, p)._replace(
            current=states.tree_map(torch.zeros_like, carry.current),
            recent=(*known[complete:kept], *new),
            totals=ends[:, complete : complete + kept].clone(),
        )
    if complete < len(chunks):
        after = after._replace(current=_copied(chunks[-1]))
    return y, state, after


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


def _wide(chunk: Chunk, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """The tensors of a chunk in `dtype`, whose rows are contiguous and equally far apart."""
    tensors = tuple(tensor.to(dtype) for tensor in chunk)
    # Of a view of the inputs a tensor that was cast is a copy, and the others are not.
    distances = {tensor.stride(0) / tensor[0].numel() for tensor in tensors}
    if len(distances) == 1 and all(tensor[0].is_contiguous() for tensor in tensors):
        return tensors
    return tuple(tensor.contiguous() for tensor in tensors)


def _copied(chunk: Chunk) -> Chunk:
    return states.tree_map(
        lambda tensor: tensor.clone(memory_format=torch.contiguous_format), chunk
    )
