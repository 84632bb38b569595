"""The recurrence over the last r inputs, without a subtraction, in chunks.

    h_t = Σ_{i = t−r+1 … t} a_{i+1} … a_t x_i B_i^T,  y_t = h_t C_t

Time is cut into chunks of L tokens, counted from the first token of the stream. With k = ⌊r / L⌋,
the window of a token in chunk c holds: its own chunk up to itself; all of the K = k − 1 chunks
before; and the end of the two chunks before those, from a column that moves with the token. The
first and the last are masked products, as in attention. The middle is a sum over K chunk states
whose window slides by one chunk at a time: two stacks, a *front* of sums from each chunk to the
end of its block of K chunks, and a *back* that grows with the block after it.

What must be remembered are the inputs of the last k + 1 chunks (no exact window can do with less)
and K states, at any length of the stream. Where h is far larger than a window's part of it, the
difference h_t − a_{t−r+1} … a_t h_{t−r} loses the digits that matter; sums of what is inside do
not.

Notable choices:
- The carry is a tuple of chunks. A step replaces the few that change and shares the rest, so that
  one token costs no copy of the window, and a kept state stays as it is.
- Slots that no token has reached hold zeros, which add nothing: the shapes do not depend on how
  much was seen. Rows at different phases (after a reset of one) run in groups of equal phase.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from longrnn.ops.precision import own_precision
from longrnn.ops.ssd.base import ScanInputs
from longrnn.ops.ssd.chunks import Chunk, cut, fill, join, stack
from longrnn.ops.ssd.rows import all_finite, apart, finite_rows
from longrnn.state import take, tree_map

CHUNK = 64
# Chunks that are computed together.
TOGETHER = 8
FLOOR = -80.0


class WindowCarry(NamedTuple):
    """What the window remembers.

    Attributes:
        phase: `(b,)` int64, tokens seen, modulo the length of a block.
        current: the chunk that is being filled.
        recent: the k + 1 complete chunks before it, oldest first.
        totals: `(b, k + 1, h)` float64, the log decay of each of them.
        front: K states `(b, h, p, n)`: in slots that the present block has reached, that chunk's
            own; in the others, the sum from that chunk to the end of the block before.
        back: `(b, h, p, n)`, the sum over the present block.
        back_decay: `(b, h)` float64, its log decay.
    """

    phase: Tensor
    current: Chunk
    recent: tuple[Chunk, ...]
    totals: Tensor
    front: tuple[Tensor, ...]
    back: Tensor
    back_decay: Tensor


class Shape(NamedTuple):
    """How a window of r tokens is cut: r = k L + rest, and K = k − 1."""

    window: int
    chunk: int
    k: int
    rest: int

    @property
    def between(self) -> int:
        """K, the chunks that are inside every token's window."""
        return self.k - 1

    @property
    def block(self) -> int:
        """Tokens after which the phase starts anew."""
        return max(1, self.between) * self.chunk


def shape_of(window: int) -> Shape:
    """Cuts a window; `window` is at least 1."""
    chunk = min(CHUNK, window)
    return Shape(window, chunk, window // chunk, window % chunk)


def init_carry(like: ScanInputs, state: Tensor, window: int) -> WindowCarry:
    """The carry before the first token.

    Args:
        like: inputs of one token without batch axis, for shapes and dtypes.
        state: `(b, h, p, n)`, for its batch, device and dtype.
        window: r.
    """
    shape, rows = shape_of(window), len(state)

    def chunk(tensor: Tensor) -> Tensor:
        return torch.zeros(
            rows, shape.chunk, *tensor.shape[1:], dtype=tensor.dtype, device=state.device
        )

    # One chunk of zeros stands for all: nothing is ever written in place.
    empty = Chunk(chunk(like.x), chunk(like.log_decay), chunk(like.B))
    wide = {"dtype": torch.float64, "device": state.device}
    return WindowCarry(
        phase=torch.zeros(rows, dtype=torch.long, device=state.device),
        current=empty,
        recent=(empty,) * (shape.k + 1),
        totals=torch.zeros(rows, shape.k + 1, state.shape[1], **wide),
        front=(torch.zeros_like(state),) * shape.between,
        back=torch.zeros_like(state),
        back_decay=torch.zeros(rows, state.shape[1], **wide),
    )


def windowed_ssd(
    inputs: ScanInputs, carry: WindowCarry, window: int
) -> tuple[Tensor, Tensor, WindowCarry]:
    """Runs the windowed recurrence.

    Args:
        inputs: see `ScanInputs`.
        carry: of `init_carry` or of an earlier call with the same window.
        window: r >= 1.

    Returns:
        y `(b, t, h, p)`, the state of the last token's window `(b, h, p, n)`, and the carry.
    """
    with own_precision(carry.back):
        phases = carry.phase.tolist()
        if len(set(phases)) == 1:
            return _of_one_phase(inputs, carry, shape_of(window), phases[0])
        groups = [
            [row for row, phase in enumerate(phases) if phase == one] for one in sorted(set(phases))
        ]
        parts = [
            _of_one_phase(take(inputs, rows), take(carry, rows), shape_of(window), phases[rows[0]])
            for rows in groups
        ]
        joined = tree_map(lambda *leaves: torch.cat(leaves), *parts)
        order = torch.tensor([row for rows in groups for row in rows]).argsort()
        return take(joined, order)


def _of_one_phase(
    inputs: ScanInputs, carry: WindowCarry, shape: Shape, phase: int
) -> tuple[Tensor, Tensor, WindowCarry]:
    """`windowed_ssd` for rows of one phase, whatever their numbers."""
    found = _run(inputs, carry, shape, phase)
    if inputs.x.shape[1] == 1 or all_finite(found[0]):
        return found
    finite = finite_rows(found[0])
    if bool(finite.all()):
        return found

    def fast(inputs: ScanInputs, carry: WindowCarry) -> tuple[Tensor, Tensor, WindowCarry]:
        return _run(inputs, carry, shape, phase)

    def one_by_one(inputs: ScanInputs, carry: WindowCarry) -> tuple[Tensor, Tensor, WindowCarry]:
        outputs, state = [], carry.back
        for t, token in enumerate(zip(*(tensor.split(1, 1) for tensor in inputs), strict=True)):
            y, state, carry = _run(ScanInputs(*token), carry, shape, (phase + t) % shape.block)
            outputs.append(y)
        return torch.cat(outputs, dim=1), state, carry

    return apart(finite, fast, one_by_one, inputs, carry)


def _run(
    inputs: ScanInputs, carry: WindowCarry, shape: Shape, phase: int
) -> tuple[Tensor, Tensor, WindowCarry]:
    """The rest of a chunk, whole chunks, the start of one."""
    time, start, outputs = inputs.x.shape[1], 0, []
    state = carry.back
    while start < time:
        offset = phase % shape.chunk
        room = shape.chunk - offset
        whole = (time - start) // shape.chunk if offset == 0 else 0
        size = min(whole, TOGETHER) * shape.chunk if whole else min(room, time - start)
        piece = ScanInputs(*(tensor[:, start : start + size] for tensor in inputs))
        y, state, carry = _piece(piece, carry, shape, phase)
        outputs.append(y)
        start, phase = start + size, (phase + size) % shape.block
    y = torch.cat(outputs, dim=1) if len(outputs) > 1 else outputs[0]
    return y, state, carry._replace(phase=torch.full_like(carry.phase, phase))


def _piece(
    inputs: ScanInputs, carry: WindowCarry, shape: Shape, phase: int
) -> tuple[Tensor, Tensor, WindowCarry]:
    """Whole chunks, or tokens of one chunk. Below, m counts chunks, q queries, j columns."""
    dtype, length = carry.back.dtype, shape.chunk
    offset, time = phase % length, inputs.x.shape[1]
    m, last = max(1, time // length), min(offset + time, length)
    part = time < length
    chunks = [fill(carry.current, inputs, offset)] if part else cut(inputs, length, carry.current)
    known = [*carry.recent, *chunks]
    x, log_decay, B = stack(chunks, last, dtype)
    C = inputs.C.to(dtype).unflatten(1, (m, -1)).transpose(2, 3)  # b m g q n
    decays = log_decay.double().clamp(min=-1e4)
    # The first token's decay is of what came before the chunk, and must not meet what is in it.
    total = F.pad(decays[:, :, 1:], (0, 0, 1, 0)).cumsum(2)  # b m j h, from the first token
    from_before = total + decays[:, :, :1]
    to_query = _exp(from_before[:, :, offset:], dtype)
    ends = torch.cat([carry.totals, from_before[:, :, -1]], dim=1)  # b k+1+m h
    between = torch.stack(
        [ends[:, i + 2 : i + shape.k + 1].sum(1) for i in range(m)], dim=1
    )  # b m h: log decay of the K chunks between

    # The token's own chunk, up to itself.
    scores = (C @ B.transpose(3, 4)).tril(diagonal=offset)  # b m g q j
    by_head = total.transpose(2, 3)
    decay = _exp(by_head[..., offset:, None] - by_head[..., None, :], dtype)
    y = _by_head(scores, decay) @ x.transpose(2, 3)  # b m h q p

    # The two oldest chunks, from the column that has not yet left the window of the first query.
    first = length + 1 - shape.rest + offset
    old = join(*(stack(known[i : i + m], length, dtype) for i in range(2)))
    old_decay = old.log_decay.double().clamp(min=-1e4)
    after = F.pad(old_decay[:, :, 1:], (0, 0, 0, 1)).flip(2).cumsum(2).flip(2)  # to the pair's end
    to_start = _exp(after + between[:, :, None], dtype)[:, :, first:]
    old_x = _by_group(old.x[:, :, first:] * to_start[..., None], B.shape[2])
    old_B = old.B[:, :, :, first:]
    before = (C @ old_B.transpose(3, 4)).triu() @ old_x  # b m g q (r p)

    # The chunks between, then everything before the token's chunk decayed to the token.
    moved = _Chunks(x, B, total, from_before[:, :, -1])
    sums, carry = _slide(carry, moved, shape, phase, complete=last == length)
    p = x.shape[4]
    sums = sums.unflatten(2, (B.shape[2], -1)).flatten(3, 4)  # b m g (r p) n
    before = (before + C @ sums.transpose(3, 4)).unflatten(4, (-1, p))  # b m g q r p
    before = before.transpose(3, 4).flatten(2, 3)  # b m h q p
    alone = last == length == shape.window  # the last token's window is its chunk
    if alone:
        to_query = F.pad(to_query[:, :, :-1], (0, 0, 0, 1))
    y = torch.addcmul(y, before, to_query.transpose(2, 3)[..., None])

    # The window of the last token as a state.
    row = last - 1 - offset
    state = _state(x[:, -1], B[:, -1], total[:, -1])
    if not alone:
        older = sums[:, -1] + old_x[:, -1, :, row:].transpose(2, 3) @ old_B[:, -1, :, row:]
        older = older.unflatten(2, (-1, p)).flatten(1, 2)  # b h p n
        state = _add(state, from_before[:, -1, -1], older)

    if last < length:
        carry = carry._replace(current=chunks[0])
    else:
        n_old = len(carry.recent)
        # A chunk that was kept is shared; a new one is copied, to let go of the whole input.
        fresh = [tree_map(torch.clone, chunk) for chunk in known[max(m, n_old) :]]
        current = tree_map(torch.zeros_like, carry.current)
        carry = carry._replace(
            current=current, recent=(*known[m:n_old], *fresh), totals=ends[:, m:].clone()
        )
    return y.transpose(2, 3).flatten(1, 2), state, carry


class _Chunks(NamedTuple):
    """Chunks to be taken in: x, B and running sums of log decays as in `_piece`, and `whole`
    `(b, m, h)`, the log decay of each chunk."""

    x: Tensor
    B: Tensor
    total: Tensor
    whole: Tensor


def _slide(
    carry: WindowCarry, chunks: _Chunks, shape: Shape, phase: int, *, complete: bool
) -> tuple[Tensor, WindowCarry]:
    """The sums over the K chunks before each chunk, `(b, m, h, p, n)`, and the stacks after."""
    x, B, total, whole = chunks
    if shape.between == 0:
        return carry.back[:, None].expand(-1, x.shape[1], -1, -1, -1), carry
    front, back, back_decay, sums = list(carry.front), carry.back, carry.back_decay, []
    slot = phase // shape.chunk
    for i in range(x.shape[1]):
        sums.append(_add(back, back_decay, front[slot]))
        if not complete:
            break
        own, decay = _state(x[:, i], B[:, i], total[:, i]), whole[:, i]
        back = own if slot == 0 else _add(own, decay, back)
        back_decay = back_decay + decay
        front[slot] = own
        slot += 1
        if slot == shape.between:
            # The block is complete: its states become sums to its end, and a new block begins.
            decays = torch.cat([carry.totals, whole[:, : i + 1]], dim=1)
            for j in range(slot - 2, -1, -1):
                front[j] = _add(front[j + 1], decays[:, j + 1 - slot :].sum(1), front[j])
            back, back_decay, slot = torch.zeros_like(back), torch.zeros_like(back_decay), 0
    after = carry._replace(front=tuple(front), back=back, back_decay=back_decay)
    return torch.stack(sums, dim=1), after


def _state(x: Tensor, B: Tensor, total: Tensor) -> Tensor:
    """Σ_j x_j B_j^T, decayed to the end: `(b, h, p, n)` from `(b, j, h, p)`, `(b, g, j, n)`."""
    to_end = _exp(total[:, -1:] - total, x.dtype)
    weighted = _by_group((x * to_end[..., None])[:, None], B.shape[1])[:, 0]  # b g j (r p)
    return (weighted.transpose(2, 3) @ B).unflatten(2, (-1, x.shape[3])).flatten(1, 2)


def _by_group(x: Tensor, groups: int) -> Tensor:
    """`(b, m, g, j, r p)` from `(b, m, j, h, p)`."""
    return x.unflatten(3, (groups, -1)).flatten(4).transpose(2, 3)


def _add(to: Tensor, log_decay: Tensor, state: Tensor) -> Tensor:
    """to + exp(log_decay) · state, the decay in two halves so that a slow one does not drift."""
    decay = log_decay.exp()
    high = decay.to(to.dtype)
    low = (decay - high).detach().to(to.dtype)
    return torch.addcmul(
        torch.addcmul(to, low[..., None, None], state), high[..., None, None], state
    )


def _by_head(scores: Tensor, decay: Tensor) -> Tensor:
    """Scores of groups `(b, m, g, q, j)` times decays of heads `(b, m, h, q, j)`."""
    groups = scores.shape[2]
    return (scores[:, :, :, None] * decay.unflatten(2, (groups, -1))).flatten(2, 3)


def _exp(log_decay: Tensor, dtype: torch.dtype) -> Tensor:
    """exp in `dtype`, and 0 below FLOOR; above 0 are only entries that a mask leaves out."""
    value = log_decay.clamp(max=0).to(dtype)
    return value.masked_fill(value < FLOOR, -torch.inf).exp()
