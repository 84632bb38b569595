"""The recurrence over the last w inputs, in chunks and without any subtraction.

    h_t = Σ_{i = t−w+1 … t} a_{i+1} … a_t gain_i x_i B_i^T,  y_t = h_t C_t

Time is cut into chunks of L tokens, counted from the first token of the stream. The window of a
token consists of three parts: the tokens of its own chunk up to itself; all of the K = ⌊w / L⌋ − 1
chunks before; and the end of the two chunks before those, from a column that moves with the token.
The first and the last part are masked products, as in attention. The middle part is a sum over K
chunk states, and its window slides by one chunk at a time. It is kept in two stacks: the *front*
holds sums from each chunk to the end of its block of K chunks, and the *back* is the sum over the
block after it.

The carry holds the inputs of the last K + 2 chunks (an exact window needs them) and K states, for a
stream of any length. The difference h_t − a_{t−w+1} … a_t h_{t−w} would need less memory, but
it loses its significant digits where h is far larger than the window's part of it.

Notable choices:
- The carry is a tuple of chunks. A step replaces the few that change and shares the others, so a
  token copies no window, and a kept state is never changed.
- Slots that are not filled yet hold zeros, which add nothing, so shapes do not depend on how many
  tokens were consumed. Rows at different phases (after the reset of one row) run in groups of equal
  phase.
- For the backend `native` without gradients, all this is one call of C++ (`native/window.h`).
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import torch
from einops import rearrange
from torch import Tensor
from torch.nn import functional as F

from longrnn.ops.precision import own_precision
from longrnn.ops.rows import run_by_phase
from longrnn.ops.ssd import native, window_native
from longrnn.ops.ssd.base import SSD, ScanInputs
from longrnn.ops.ssd.chunks import cut, fill, join, stack
from longrnn.ops.ssd.decays import add_decayed, floored_exp
from longrnn.ops.ssd.window_carry import WindowCarry, WindowShape, shape_in
from longrnn.state import tree_map

# How many chunks are computed at once: so many, and of long ones no more tokens than these have.
CHUNKS_AT_ONCE, TOKENS_AT_ONCE = 8, 512


def windowed_ssd(
    inputs: ScanInputs, carry: WindowCarry, window: int, ssd: SSD
) -> tuple[Tensor, Tensor, WindowCarry]:
    """Runs the windowed recurrence.

    Args:
        inputs: see `ScanInputs`.
        carry: from `init_carry` or from an earlier call with the same window.
        window: in tokens, at least 1.
        ssd: computes the plain recurrence of the same layer; that of the backend `native` has
            kernels for the window too.

    Returns:
        y `(b, t, h, p)`, the state of the last token's window `(b, h, p, n)`, and the carry.
    """
    with own_precision(carry.back):
        run = partial(_one_phase, shape_in(carry, window), ssd is native.ssd)
        return run_by_phase(run, carry.phase, inputs, carry)


def _one_phase(
    shape: WindowShape, in_cpp: bool, inputs: ScanInputs, carry: WindowCarry, phase: int
) -> tuple[Tensor, Tensor, WindowCarry]:
    """`windowed_ssd` for rows that are all at one phase."""
    if in_cpp:
        found = window_native.windowed(inputs, carry, shape, phase)
        if found is not None:
            return found
    return _run(inputs, carry, shape, phase)


def _run(
    inputs: ScanInputs, carry: WindowCarry, shape: WindowShape, phase: int
) -> tuple[Tensor, Tensor, WindowCarry]:
    """Computes the rest of a chunk, then whole chunks, then the start of a chunk."""
    time, start, outputs = inputs.x.shape[1], 0, []
    state = carry.back
    while start < time:
        offset = phase % shape.chunk
        room = shape.chunk - offset
        whole = (time - start) // shape.chunk if offset == 0 else 0
        most = min(CHUNKS_AT_ONCE, max(1, TOKENS_AT_ONCE // shape.chunk))
        size = min(whole, most) * shape.chunk if whole else min(room, time - start)
        part = inputs.slice(start, start + size)
        y, state, carry = _chunks(part, carry, shape, phase)
        outputs.append(y)
        start, phase = start + size, (phase + size) % shape.block
    y = torch.cat(outputs, dim=1) if len(outputs) > 1 else outputs[0]
    return y, state, carry._replace(phase=torch.full_like(carry.phase, phase))


def _chunks(
    inputs: ScanInputs, carry: WindowCarry, shape: WindowShape, phase: int
) -> tuple[Tensor, Tensor, WindowCarry]:
    """Computes whole chunks, or some tokens of one chunk; i is an output's token, j an input's."""
    dtype, length = carry.back.dtype, shape.chunk
    offset, time = phase % length, inputs.x.shape[1]
    m, last = max(1, time // length), min(offset + time, length)
    part = time < length
    chunks = [fill(carry.current, inputs, offset)] if part else cut(inputs, length, carry.current)
    known = [*carry.recent, *chunks]
    u, log_decay, B = stack(chunks, last, dtype)
    C = rearrange(inputs.C.to(dtype), "b (m i) g n -> b m g i n", m=m)
    decays = log_decay.double().clamp(min=-1e4)
    # The first token's decay applies to earlier chunks only, and must not touch this one.
    total = F.pad(decays[:, :, 1:], (0, 0, 1, 0)).cumsum(2)  # b m j h, from the first token
    from_before = total + decays[:, :, :1]
    to_token = floored_exp(from_before[:, :, offset:], dtype)
    ends = torch.cat([carry.totals, from_before[:, :, -1]], dim=1)  # b (K + 2 + m) h
    between = torch.stack(
        [ends[:, i + 2 : i + shape.whole + 1].sum(1) for i in range(m)], dim=1
    )  # b m h, log decay of the K chunks between

    # The token's own chunk, up to itself.
    scores = (C @ B.transpose(3, 4)).tril(diagonal=offset)  # b m g i j
    by_head = total.transpose(2, 3)
    decay = floored_exp(by_head[..., offset:, None] - by_head[..., None, :], dtype)
    y = _by_head(scores, decay) @ u.transpose(2, 3)  # b m h i p

    # The two oldest chunks, from the first column that is still in the window of the first token.
    first = length + 1 - shape.rest + offset
    old = join(*(stack(known[i : i + m], length, dtype) for i in range(2)))
    old_decay = old.log_decay.double().clamp(min=-1e4)
    after = F.pad(old_decay[:, :, 1:], (0, 0, 0, 1)).flip(2).cumsum(2).flip(2)  # to the pair's end
    to_start = floored_exp(after + between[:, :, None], dtype)[:, :, first:]
    old_u = _by_group(old.u[:, :, first:] * to_start[..., None], B.shape[2])
    old_B = old.B[:, :, :, first:]
    before = (C @ old_B.transpose(3, 4)).triu() @ old_u  # b m g i (r p)

    # The chunks between, then everything before the token's chunk, decayed to the token.
    stacked = _Stacked(u, B, total, from_before[:, :, -1])
    sums, carry = _slide(carry, stacked, shape, phase, complete=last == length)
    p = u.shape[4]
    sums = sums.unflatten(2, (B.shape[2], -1)).flatten(3, 4)  # b m g (r p) n
    before = (before + C @ sums.transpose(3, 4)).unflatten(4, (-1, p))  # b m g i r p
    before = before.transpose(3, 4).flatten(2, 3)  # b m h i p
    alone = last == length == shape.window  # the window of the last token is its chunk
    if alone:
        to_token = F.pad(to_token[:, :, :-1], (0, 0, 0, 1))
    y = torch.addcmul(y, before, to_token.transpose(2, 3)[..., None])

    # The window of the last token as a state.
    row = last - 1 - offset
    state = _state(u[:, -1], B[:, -1], total[:, -1])
    if not alone:
        older = sums[:, -1] + old_u[:, -1, :, row:].transpose(2, 3) @ old_B[:, -1, :, row:]
        older = older.unflatten(2, (-1, p)).flatten(1, 2)  # b h p n
        state = add_decayed(state, from_before[:, -1, -1], older)

    if last < length:
        carry = carry._replace(current=chunks[0])
    else:
        n_old = len(carry.recent)
        # Kept chunks are shared; new ones are copied, so that the whole input can be freed.
        new = [tree_map(torch.clone, chunk) for chunk in known[max(m, n_old) :]]
        current = tree_map(torch.zeros_like, carry.current)
        carry = carry._replace(
            current=current, recent=(*known[m:n_old], *new), totals=ends[:, m:].clone()
        )
    return y.transpose(2, 3).flatten(1, 2), state, carry


class _Stacked(NamedTuple):
    """Stacked chunks: u, B and running sums of log decays as in `_chunks`, and `whole` `(b, m, h)`,
    the log decay of each chunk."""

    u: Tensor
    B: Tensor
    total: Tensor
    whole: Tensor


def _slide(
    carry: WindowCarry, chunks: _Stacked, shape: WindowShape, phase: int, *, complete: bool
) -> tuple[Tensor, WindowCarry]:
    """The sums over the K chunks before each chunk, `(b, m, h, p, n)`, and the new carry."""
    u, B, total, whole = chunks
    if shape.between == 0:
        return carry.back[:, None].expand(-1, u.shape[1], -1, -1, -1), carry
    front, back, back_decay, sums = list(carry.front), carry.back, carry.back_decay, []
    slot = phase // shape.chunk
    for i in range(u.shape[1]):
        sums.append(add_decayed(back, back_decay, front[slot]))
        if not complete:
            break
        own, decay = _state(u[:, i], B[:, i], total[:, i]), whole[:, i]
        back = own if slot == 0 else add_decayed(own, decay, back)
        back_decay = back_decay + decay
        front[slot] = own
        slot += 1
        if slot == shape.between:
            # The block is complete: replace its states by sums to its end, and start a new block.
            decays = torch.cat([carry.totals, whole[:, : i + 1]], dim=1)
            for j in range(slot - 2, -1, -1):
                front[j] = add_decayed(front[j + 1], decays[:, j + 1 - slot :].sum(1), front[j])
            back, back_decay, slot = torch.zeros_like(back), torch.zeros_like(back_decay), 0
    after = carry._replace(front=tuple(front), back=back, back_decay=back_decay)
    return torch.stack(sums, dim=1), after


def _state(u: Tensor, B: Tensor, total: Tensor) -> Tensor:
    """Σ_j u_j B_j^T, decayed to the end: `(b, h, p, n)` from `(b, j, h, p)`, `(b, g, j, n)`."""
    to_end = floored_exp(total[:, -1:] - total, u.dtype)
    weighted = _by_group((u * to_end[..., None])[:, None], B.shape[1])[:, 0]  # b g j (r p)
    return (weighted.transpose(2, 3) @ B).unflatten(2, (-1, u.shape[3])).flatten(1, 2)


def _by_group(x: Tensor, groups: int) -> Tensor:
    """`(b, m, g, j, r p)` from `(b, m, j, h, p)`."""
    return rearrange(x, "b m j (g r) p -> b m g j (r p)", g=groups)


def _by_head(scores: Tensor, decay: Tensor) -> Tensor:
    """Scores of groups `(b, m, g, i, j)` times decays of heads `(b, m, h, i, j)`."""
    groups = scores.shape[2]
    return (scores[:, :, :, None] * decay.unflatten(2, (groups, -1))).flatten(2, 3)
