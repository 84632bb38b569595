"""Runs a cell on one share of a text whose other shares are on other processes.

The state before the whole text is known to every process; that before a share is found in one of
three ways, all of them exact and differentiable:

| cell and edit | how | |
| --- | --- | --- |
| scans; no carry | all scan from zero, then combine decays and end states | `_scanned` |
| scans; a window | each reads the end of the share before too | `_overlapped` |
| any other | each waits for the state of the share before, layer by layer | `_in_turn` |

In turn, a process works on its first layer while the one before works on its second: of the time of
n processes, about layers / (layers + n − 1) is used.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from longrnn.mixers.base import Mixer, ScanningMixer
from longrnn.mixers.composed import Composed
from longrnn.mixers.edits import Edit, EditedState
from longrnn.ops.collectives import ContextGroup, gather, receive, send
from longrnn.ops.packed_rows import PackedRows
from longrnn.ops.ssd import SSD, ScanInputs
from longrnn.ops.ssd.decays import split_decay
from longrnn.ops.ssd.ends import end_state
from longrnn.state import PyTree, leaves, reset


class Share(NamedTuple):
    """The share of this process in one call, and what it knows of the others.

    Attributes:
        group: the processes with the other shares.
        rows: where documents and padding begin in the share of this process; None without any.
        tokens: `(s, b)` int64, tokens of each share.
        restarts: `(s, b)` bool, in which shares a document begins.
        shortest: tokens of the shortest share but the last, if all rows are one document without
            padding, and 0 otherwise.
        is_empty: whether this share has no tokens; the cell then gets one token of padding.
    """

    group: ContextGroup
    rows: PackedRows | None
    tokens: Tensor
    restarts: Tensor
    shortest: int
    is_empty: bool


class SharedState(NamedTuple):
    """What goes through the layers of a call beside the hidden vectors.

    Attributes:
        state: of one layer, before the whole text or after the share of this process.
        flow: of the last exchange, see `longrnn.ops.collectives`.
    """

    state: PyTree
    flow: Tensor


def run_share(
    mixer: Mixer, x: Tensor, before: SharedState, edit: Edit | None, share: Share
) -> tuple[Tensor, SharedState]:
    """Runs a cell on a share.

    Args:
        mixer: the cell.
        x: `(b, t, d_input)`, the inputs of the share of this process.
        before: the state before the whole text, the same in all processes.
        edit: of the layer; None for none.
        share: see `Share`.

    Returns:
        y `(b, t, d_model)`, and the state after the share.
    """
    if share.group.record is not None:
        share.group.record.begin()
    state, flow = before
    state = state if isinstance(state, EditedState) else EditedState(state, ())
    one, plain = edit or Edit(), not isinstance(before.state, EditedState)
    carries = any(True for _ in leaves(state.carry))
    if isinstance(mixer, ScanningMixer) and not carries and not one.redefines_recurrence:
        y, after, flow = _scanned(mixer, x, state, flow, one, share)
    elif isinstance(mixer, ScanningMixer) and 0 < _overlap(mixer, one) <= share.shortest:
        y, after, flow = _overlapped(mixer, x, state, flow, one, share)
    else:
        return _in_turn(mixer, x, before, edit, share)
    return y, SharedState(after.state if plain else after, flow)


class _Passed(NamedTuple):
    """The carry of `_ContextScan`: the flow, and after the scan the state before the share."""

    flow: Tensor
    start: Tensor | None


class _ContextScan(Edit):
    """The recurrence over one share, from the end states of the shares before it."""

    def __init__(self, group: ContextGroup) -> None:
        self.group = group

    def scan(
        self, inputs: ScanInputs, state: Tensor, carry: _Passed, ssd: SSD
    ) -> tuple[Tensor, Tensor, PyTree]:
        end = end_state(inputs, torch.zeros_like(state), ssd)
        # In float64: over a long share, a sum in float32 loses the digits of a slow decay.
        total = inputs.log_decay.double().sum(1)
        flow, (totals, ends) = gather(self.group, carry.flow, total, end)
        start = state
        for earlier in range(self.group.rank):
            start = _continued(start, totals[earlier], ends[earlier])
        y, after = ssd(inputs, start)
        return y, after, _Passed(flow, start)


def _continued(state: Tensor, log_decay: Tensor, end: Tensor) -> Tensor:
    """The state after a share, `(b, h, p, n)`.

    Args:
        state: before the share.
        log_decay: of the whole share, `(b, h)` float64; −∞ where a document begins in it.
        end: the state after the share if that before it were zero.
    """
    log_decay = log_decay[..., None, None]
    # Never a product with 0: the state of another document may be NaN.
    kept = state.masked_fill(log_decay == -torch.inf, 0)
    whole, rest = (part.to(state.dtype) for part in split_decay(log_decay, state.dtype))
    return torch.addcmul(torch.addcmul(end, rest, kept), whole, kept)


def _scanned(
    mixer: ScanningMixer, x: Tensor, before: EditedState, flow: Tensor, edit: Edit, share: Share
) -> tuple[Tensor, EditedState, Tensor]:
    """All processes scan at the same time; see the table above."""
    rows, own = share.rows, before.state
    flow, recent = _recent(mixer, x, own, share, flow)
    own = mixer.with_recent(own, recent)
    if rows is not None and rows.starts_at_once:
        own = reset(own, mixer.init_state(len(x)), rows.is_start[:, 0])
    edits = Composed([edit, _ContextScan(share.group)])
    carry = (before.carry, _Passed(flow, None))
    y, after, (carry, (flow, start)) = mixer.run(x, own, edits, carry, rows)
    if rows is not None:
        y = rows.without_padding(y)
        # A row without tokens in this share has the state before it, which `run` does not know.
        after = mixer.with_memory(after, _where(rows.count == 0, start, mixer.memory(after)))
    return y, EditedState(after, carry), flow


def _where(rows: Tensor, one: Tensor, other: Tensor) -> Tensor:
    """`one` in the given rows, `(b,)` bool, and `other` elsewhere."""
    return torch.where(rows.view(-1, *[1] * (one.ndim - 1)), one, other)


def _recent(
    mixer: ScanningMixer, x: Tensor, state: PyTree, share: Share, flow: Tensor
) -> tuple[Tensor, Tensor]:
    """`ScanningMixer.recent` of the state before this share, from the ends of those before it."""
    recent = mixer.recent(state)
    if recent.shape[1] == 0:
        return flow, recent
    reach, rank = recent.shape[1], share.group.rank
    slots = torch.arange(reach, device=x.device)
    time = share.tokens[rank][:, None] - reach + slots  # b k
    index = time.clamp(min=0)[..., None].expand(-1, -1, x.shape[2])
    unread = time < 0
    if share.rows is not None:
        since = share.rows.since_start.gather(1, (share.rows.count - 1).clamp(min=0)[:, None])
        unread = unread | (slots.flip(0) > since)  # of another document
    own = mixer.recent_of(x.gather(1, index)).to(recent.dtype)
    flow, (ends,) = gather(share.group, flow, own.masked_fill(unread[..., None], 0))
    counts = share.tokens.clamp(max=reach).masked_fill(share.restarts, reach)
    for earlier in range(rank):
        source = slots + counts[earlier][:, None]
        kept = recent.gather(1, source.clamp(max=reach - 1)[..., None].expand_as(recent))
        recent = torch.where((source < reach)[..., None], kept, ends[earlier])
    return flow, recent


def _overlap(mixer: ScanningMixer, edit: Edit) -> int:
    """Tokens before a share that determine the state before it; 0 without such a number."""
    reach = edit.reach()
    recent = mixer.recent(mixer.init_state(1))
    return 0 if reach is None else reach + recent.shape[1]


def _overlapped(
    mixer: ScanningMixer, x: Tensor, before: EditedState, flow: Tensor, edit: Edit, share: Share
) -> tuple[Tensor, EditedState, Tensor]:
    """Each process reads the end of the share before too; see the table above."""
    group, width = share.group, _overlap(mixer, edit)
    flow = send(group, flow, (x[:, x.shape[1] - width :],))
    flow, (earlier,) = receive(group, flow, (x.new_zeros(len(x), width, x.shape[2]),))
    if group.is_first:
        y, state, carry = mixer.run(x, before.state, edit, before.carry)
        return y, EditedState(state, carry), flow
    read = int(share.tokens[: group.rank, 0].sum()) - width
    blank = edit.blank_carry(before.carry, read)
    state = mixer.init_state(len(x))
    y, state, carry = mixer.run(torch.cat([earlier, x], dim=1), state, edit, blank)
    return y[:, width:], EditedState(state, carry), flow


def _in_turn(
    mixer: Mixer, x: Tensor, before: SharedState, edit: Edit | None, share: Share
) -> tuple[Tensor, SharedState]:
    """One process after another; see the table above."""
    flow, start = receive(share.group, before.flow, before.state)
    y, after = mixer(x, start, edit, None if share.is_empty else share.rows)
    if share.is_empty:
        # The token stands for none. Selected and not left out, so that the backward pass reaches
        # all weights in this process too.
        every = torch.ones(len(x), dtype=torch.bool, device=x.device)
        after, y = reset(after, start, every), y.masked_fill(every[:, None, None], 0)
    return y, SharedState(after, send(share.group, flow, after))
