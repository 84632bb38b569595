"""One token of the windowed recurrence without reading its phase, for CUDA graphs.

    h_t = exp(d_t) (start + Σ_{j ≥ o} older_j) + Σ_{i ≤ o} own_i

Until its chunk is complete, a token changes one slot of a `WindowCarry`. All other parts that it
reads are the same for all tokens of the chunk: `start`, the sum over the chunks between, and the
tokens of the two chunks before those that have not left the window of the chunk's first token.
`StaticWindow` holds them and the number o of tokens in the chunk, on the device. The token that
completes the chunk is computed by `windowed_ssd` from the carry.

Notable choices:
- Tokens outside the window are excluded by a mask, and not by a weight of 0: 0 · NaN is NaN.
- `step` writes the token into the current chunk in place. States remain values, because a
  `StaticWindow` is a copy, and `carry_after` copies it again.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from einops import rearrange
from torch import Tensor
from torch.nn import functional as F

from longrnn.ops.precision import own_precision
from longrnn.ops.ssd.base import ScanInputs
from longrnn.ops.ssd.chunks import Chunk
from longrnn.ops.ssd.decays import add_decayed, floored_exp
from longrnn.ops.ssd.window_carry import WindowCarry, shape_in
from longrnn.state import tree_map

# See `chunked`: exp of it is 0, and sums with it keep their digits.
LEAST = -1e4


class Older(NamedTuple):
    """The tokens before the chunks between that are in the window of the current chunk's first one.

    The window of token o of the chunk begins at j = o.

    Attributes:
        x: `(b, j, h, p)`.
        B: `(b, j, g, n)`.
        weight: `(b, j, h)`, gain times the decay to the start of the current chunk.
    """

    x: Tensor
    B: Tensor
    weight: Tensor


class StaticWindow(NamedTuple):
    """What the tokens of one chunk read, in tensors whose addresses never change.

    It belongs to one decoder. Slots of `current` from `offset` on have no meaning.

    Attributes:
        offset: `(b,)` int64, tokens in the current chunk.
        current: the chunk that is being filled.
        older: see `Older`.
        start: `(b, h, p, n)`, the sum over the chunks between at the start of the current chunk.
    """

    offset: Tensor
    current: Chunk
    older: Older
    start: Tensor


def static_window(carry: WindowCarry, window: int) -> StaticWindow:
    """The window of a carry, from which it shares no memory; reads the phase."""
    shape, dtype = shape_in(carry, window), carry.back.dtype
    first = shape.chunk + 1 - shape.rest
    x, gain, log_decay, B = (
        torch.cat([pair[0][:, first:], pair[1][:, max(0, first - shape.chunk) :]], dim=1)
        for pair in zip(*carry.recent[:2], strict=True)
    )
    decays = log_decay.double().clamp(min=LEAST)
    to_end = F.pad(decays[:, 1:], (0, 0, 0, 1)).flip(1).cumsum(1).flip(1)
    between = carry.totals[:, 2 : shape.whole + 1].sum(1, keepdim=True)
    weight = gain.to(dtype) * floored_exp(to_end + between, dtype)
    start = carry.back.clone(memory_format=torch.contiguous_format)
    if shape.between:
        slots = (carry.phase // shape.chunk).tolist()
        rows = [carry.front[slot][row : row + 1] for row, slot in enumerate(slots)]
        start = add_decayed(start, carry.back_decay, torch.cat(rows))
    current = tree_map(_copied, carry.current)
    return StaticWindow(carry.phase % shape.chunk, current, Older(x, B, weight), start)


def tokens_left(carry: WindowCarry, window: int) -> Tensor:
    """How many tokens of each row can be consumed before one that completes a chunk, `(b,)`."""
    length = shape_in(carry, window).chunk
    return length - 1 - carry.phase % length


def carry_after(carry: WindowCarry, static: StaticWindow) -> WindowCarry:
    """The carry after the tokens that `static`, made from `carry`, has consumed since."""
    length = carry.current.x.shape[1]
    is_filled = torch.arange(length, device=static.offset.device) < static.offset[:, None]

    def filled(slots: Tensor) -> Tensor:
        return torch.where(is_filled.view(*is_filled.shape, *[1] * (slots.ndim - 2)), slots, 0)

    phase = carry.phase - carry.phase % length + static.offset
    return carry._replace(phase=phase, current=tree_map(filled, static.current))


def step(inputs: ScanInputs, static: StaticWindow) -> tuple[Tensor, Tensor, StaticWindow]:
    """Consumes one token that does not complete a chunk, without gradients.

    Args:
        inputs: of one token per row; see `ScanInputs`.
        static: changed in place.

    Returns:
        y `(b, 1, h, p)`, the state of the token's window `(b, h, p, n)`, and the new window.
    """
    with own_precision(static.start):
        y, state = _in_torch(inputs, static)
    return y, state, static._replace(offset=static.offset + 1)


def _in_torch(inputs: ScanInputs, static: StaticWindow) -> tuple[Tensor, Tensor]:
    offset, current, known, start = static
    dtype = start.dtype
    length, groups = current.x.shape[1], current.B.shape[2]
    rows = torch.arange(len(offset), device=offset.device)
    # Rows that have ended, and tokens of a warm-up, may stand past the last slot.
    slot = offset.clamp(max=length - 1)
    for slots, new in zip(current, inputs[:4], strict=True):
        slots[rows, slot] = new[:, 0].to(slots.dtype)
    place, age = (torch.arange(count, device=offset.device) for count in (length, known.x.shape[1]))
    is_own, is_older = place <= offset[:, None], age >= offset[:, None]

    decays = current.log_decay.double().clamp(min=LEAST).where(is_own[..., None], 0)
    to_token = F.pad(decays[:, 1:], (0, 0, 0, 1)).flip(1).cumsum(1).flip(1)
    since_start = decays.sum(1)
    own = current.gain.to(dtype) * floored_exp(to_token, dtype)
    older = known.weight * floored_exp(since_start, dtype)[:, None]

    inside = torch.cat([is_older, is_own], dim=1)[..., None, None]
    u = torch.cat([known.x, current.x], dim=1).to(dtype)
    u = (u * torch.cat([older, own], dim=1)[..., None]).where(inside, 0)
    B = torch.cat([known.B, current.B], dim=1).to(dtype).where(inside, 0)
    added = torch.einsum("bjgrp,bjgn->bgrpn", u.unflatten(2, (groups, -1)), B).flatten(1, 2)
    state = add_decayed(added, since_start, start)
    by_group = state.unflatten(1, (groups, -1))
    y = torch.einsum("bgrpn,bgn->bgrp", by_group, inputs.C[:, 0].to(dtype))
    return rearrange(y, "b g r p -> b 1 (g r) p"), state


def _copied(tensor: Tensor) -> Tensor:
    return tensor.clone(memory_format=torch.contiguous_format)
