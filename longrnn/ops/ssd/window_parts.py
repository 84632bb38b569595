"""The outputs of the windowed recurrence as plain recurrences, whose backward passes are fast.

The chunks of the carry are segments of S tokens here, w = whole · S + rest. The window of row r of
segment c has three parts (`longrnn.ops.ssd.window`):

- Its own tokens up to row r, and the K = whole − 1 segments before. Together they are a recurrence
  over the segment from the state F_c = Σ_i D_ci U_i. U_i is what segment i adds, from zero, and
  D_ci the decay from its end to the start of segment c, or 0 where it is not between.
- The end of the pair of segments before those. That of row r − 1 has one token more. So it is a
  recurrence that runs backward in time, without decay, over tokens that are multiplied by their
  decay to the start of segment c; its first state are the tokens that all rows read.

A call is at most four recurrences, with all segments as rows of a batch, and one matrix product
with the states U_i. Nothing is subtracted but sums of log decays.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from longrnn.ops.ssd.base import SSD, ScanInputs
from longrnn.ops.ssd.chunks import Chunk
from longrnn.ops.ssd.decays import FLOOR
from longrnn.ops.ssd.window_carry import WindowShape


def outputs(known: Chunk, C: Tensor, shape: WindowShape, ssd: SSD, dtype: torch.dtype) -> Tensor:
    """The outputs of a call that begins at the start of a segment.

    Args:
        known: the tokens of `whole + 1` segments before the call and of the call, `(b, s + t, …)`.
        C: `(b, t, g, n)`.
        shape: see `WindowShape`.
        ssd: a plain recurrence.
        dtype: of its states.

    Returns:
        y `(b, t, h, p)`.
    """
    length, time = shape.chunk, C.shape[1]
    missing = -time % length
    known = Chunk(*(_padded(tensor, missing) for tensor in known))
    known = known._replace(gain=known.gain.to(dtype))  # gives other tensors their dtype
    new = (one[:, (shape.whole + 1) * length :] for one in known)
    own = ScanInputs(*new, C=_padded(C, missing))
    decays = _decays(known.log_decay, length)
    rows = ScanInputs(*(_rows(tensor, length) for tensor in own))
    first, b = _between(known, rows, decays, shape, ssd), len(C)
    y = ssd(rows, first)[0].unflatten(0, (b, -1))  # b m s h p
    older = _edges(known, rows, decays, shape, ssd).unflatten(0, (b, -1))
    to_row = decays.inside[:, shape.whole + 1 :].cumsum(2).exp().to(older.dtype)
    y = torch.addcmul(y, older, to_row[..., None])
    return y.flatten(1, 2)[:, :time]


class _Decays(NamedTuple):
    """Log decays in float64.

    Attributes:
        inside: those of the tokens of each segment, `(b, segments, s, h)`.
        before: their sum over all earlier segments, and over all, `(b, segments + 1, h)`.
    """

    inside: Tensor
    before: Tensor


def _decays(log_decay: Tensor, length: int) -> _Decays:
    # −∞ becomes a number whose exp is nearly 0, and which leaves the digits of later sums.
    wide = log_decay.double().clamp(min=2 * FLOOR).unflatten(1, (-1, length))
    return _Decays(wide, F.pad(wide.sum(2).cumsum(1), (0, 0, 1, 0)))


def _between(
    known: Chunk, rows: ScanInputs, decays: _Decays, shape: WindowShape, ssd: SSD
) -> Tensor:
    """F_c as the first states of the rows of a batch, `(b m, h, p, n)`."""
    b, between = len(known.x), shape.between
    segments = len(rows.x) // b
    if between == 0:
        return _zeros(rows, b * segments)
    count, first = between + segments - 1, 2 * shape.chunk
    used = (one[:, first : first + count * shape.chunk] for one in known)
    ahead = [_rows(tensor, shape.chunk) for tensor in used]
    added = ssd(ScanInputs(*ahead, C=ahead[3]), _zeros(rows, b * count))[1]
    added = added.unflatten(0, (b, count))
    own, other = (torch.arange(size, device=added.device) for size in (segments, count))
    distance = other - own[:, None]  # of a segment from the oldest one between
    inside = (distance >= 0) & (distance < between)
    to_start = decays.before[:, between + 2 : between + 2 + segments, None]
    log_decay = to_start - decays.before[:, None, 3 : 3 + count]  # b c i h
    decay = log_decay.masked_fill(~inside[..., None], -torch.inf).exp().to(added.dtype)
    return torch.einsum("bcih,bihpn->bchpn", decay, added).flatten(0, 1)


def _edges(known: Chunk, rows: ScanInputs, decays: _Decays, shape: WindowShape, ssd: SSD) -> Tensor:
    """What the pair before those between adds to each row, at the start of its segment."""
    length, rest, b = shape.chunk, shape.rest, len(known.x)
    segments = len(rows.x) // b
    # The token at (c, r) is the oldest one in the window of row r of segment c.
    row = torch.arange(length, device=known.x.device)
    start = length - rest + 1
    x, gain, _, B = (one[:, start : start + segments * length] for one in known)
    inside = decays.inside
    after = F.pad(inside[:, :, 1:], (0, 0, 0, 1)).flip(2).cumsum(2).flip(2).flatten(1, 2)
    after = after[:, start : start + segments * length].unflatten(1, (-1, length))
    to_start = decays.before[:, shape.whole + 1 :][:, :segments]  # b m h
    old, new = (decays.before[:, first : first + segments] for first in (1, 2))
    in_old = (row < rest - 1)[:, None]
    behind = torch.where(in_old, old[:, :, None], new[:, :, None])
    log_weight = after + (to_start[:, :, None] - behind)
    # With a rest of 0 no token of the pair is in the window of the last row.
    exists = row < length + rest - 1
    log_weight = log_weight.masked_fill(~exists[:, None], -torch.inf).flatten(0, 1)
    weight = _rows(gain, length) * log_weight.exp().to(gain.dtype)
    backward = ScanInputs(
        _rows(x, length), weight, torch.zeros_like(weight), _rows(B, length), rows.C
    )
    state = _always(known, rows, to_start - new, shape, ssd)
    y = ssd(ScanInputs(*(tensor.flip(1) for tensor in backward)), state)[0]
    return y.flip(1)


def _always(
    known: Chunk, rows: ScanInputs, log_decay: Tensor, shape: WindowShape, ssd: SSD
) -> Tensor:
    """The tokens of a pair that are in the window of all rows: its last `rest − 1` ones."""
    length, b = shape.chunk, len(known.x)
    segments = len(rows.x) // b
    state = _zeros(rows, len(rows.x))
    if shape.rest <= 1:
        return state
    second = (one[:, length : (segments + 1) * length] for one in known)
    last = [_rows(tensor, length)[:, length - shape.rest + 1 :] for tensor in second]
    added = ssd(ScanInputs(*last, C=last[3]), state)[1]
    decay = log_decay.exp().to(added.dtype).flatten(0, 1)
    return added * decay[..., None, None]


def _zeros(like: ScanInputs, count: int) -> Tensor:
    """States `(count, h, p, n)`."""
    return like.gain.new_zeros(count, *like.x.shape[2:], like.B.shape[3])


def _rows(tensor: Tensor, length: int) -> Tensor:
    """Segments as rows of a batch: `(b m, s, …)` from `(b, m s, …)`."""
    return tensor.unflatten(1, (-1, length)).flatten(0, 1)


def _padded(tensor: Tensor, missing: int) -> Tensor:
    """A tensor `(b, t, …)` with `missing` zeros after its last token."""
    return F.pad(tensor, (0, 0) * (tensor.ndim - 2) + (0, missing)) if missing else tensor
