"""Runs a model on one share of every row, while other processes run it on the other shares.

Each process holds consecutive tokens of every row (any number, also none), and all hold the state
before the first token of the row. All of them get the state after its last token; outputs stay
with the tokens that they belong to. Results and gradients are those of one process: see
`longrnn.mixers.context` for the cells.

A parameter's gradient is that of the share of the process: the sum over the processes of a group is
the gradient of one process. Gradients of a given state must be summed likewise.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from longrnn.errors import UserError
from longrnn.mixers import Edit, EditedState
from longrnn.mixers.context import Share, SharedState
from longrnn.models.blocks import Residual, deferred
from longrnn.models.recompute import recomputed
from longrnn.ops.collectives import ContextGroup, Record, begin, end, from_last
from longrnn.ops.packed_rows import PackedRows
from longrnn.state import LMState

if TYPE_CHECKING:
    from longrnn.models.recurrent import RecurrentLM

__all__ = ["ContextGroup", "check_divisible", "from_shares", "hidden_of_share", "share_of"]


def check_divisible(model: object) -> None:
    """Refuses a model whose rows cannot be divided between processes.

    Raises:
        UserError: it has layers that are not cells of longrnn, or a backend that may refuse the
            share of one process while the others wait.
    """
    from longrnn.models.recurrent import RecurrentLM

    if not isinstance(model, RecurrentLM):
        raise UserError(
            f"the rows of a {type(model).__name__} cannot be divided between processes: its "
            "layers share more than a recurrent state; leave out context_parallel_size or "
            "--context-parallel"
        )
    if any(mixer.reads_device for mixer in model.mixers):
        raise UserError(
            "a backend that refuses some inputs cannot read a share of a row: set backend=auto"
        )


def share_of(length: int, group: ContextGroup) -> slice:
    """The tokens of this process in rows of `length` tokens: shares differ by one at most."""
    first, last = (length * rank // group.size for rank in (group.rank, group.rank + 1))
    return slice(first, last)


def from_shares(group: ContextGroup, own: Tensor, columns: Tensor, length: int) -> Tensor:
    """The values of all shares, `(b, length)`, in all processes; without gradients.

    Args:
        group: all its processes call this.
        own: `(b, t)`, values of the share of this process.
        columns: `(t,)` int64, where they belong; those of all processes differ.
        length: values of a row.
    """
    whole = torch.zeros(len(own), length, dtype=own.dtype, device=own.device)
    return group.gather(whole.index_copy(1, columns, own)).sum(0)


def hidden_of_share(
    model: RecurrentLM,
    tokens: Tensor,
    rows: PackedRows | None,
    state: LMState,
    edits: Sequence[Edit] | None,
    group: ContextGroup,
) -> tuple[Tensor, LMState]:
    """The output of the last block for the share of this process, and the state after all shares.

    Args:
        model: runs with the same arguments but `tokens` and `rows` in all processes.
        tokens: `(b, t)` int64, the share of this process, without padding in front of tokens.
        rows: where documents and padding begin in it; None without any.
        state: before the first token of the rows; with `edits`, `extra` holds their carries.
        edits: one per layer; None for none.
        group: the processes of the other shares.
    """
    count = tokens.shape[1]
    if count == 0:
        # Cells read at least one token.
        tokens = tokens.new_zeros(len(tokens), 1)
        starts = torch.zeros_like(tokens, dtype=torch.bool)
        rows = PackedRows(starts, torch.zeros_like(state.position))
    share, position, after = _share(tokens, rows, state.position, group, is_empty=count == 0)
    before = state._replace(position=position)
    flow = begin((state.layers, state.extra))
    again = model.recomputation
    shares = [
        share if again == "no" else share._replace(group=replace(group, record=Record()))
        for _ in model.blocks
    ]
    run = (model, tokens, before, edits, shares, flow)
    x, layers, flow = recomputed(_layers, *run) if again == "segment" else _layers(*run)
    flow, layers = from_last(group, flow, layers)
    x = end(flow, x[:, :count])
    if edits is None:
        return x, LMState(after, layers)
    own, carries = zip(*layers, strict=True)
    return x, LMState(after, own, carries)


def _layers(
    model: RecurrentLM,
    tokens: Tensor,
    state: LMState,
    edits: Sequence[Edit] | None,
    shares: Sequence[Share],
    flow: Tensor,
) -> tuple[Tensor, tuple[object, ...], Tensor]:
    """The output of the last block, the state of each layer after the share, and the flow."""
    rows = shares[0].rows
    x, _ = model.embed(tokens, state.position, rows)
    between = deferred(model.blocks, x)
    layers = []
    parts = zip(model.blocks, state.layers, shares, strict=True)
    for index, (block, layer, share) in enumerate(parts):
        edit = None if edits is None else edits[index]
        before = layer if edit is None else EditedState(layer, state.extra[index])
        between, after = block(between, SharedState(before, flow), edit, rows, share)
        flow = after.flow
        layers.append(after.state)
    return Residual.of(between).sum(), tuple(layers), flow


class _Counts(NamedTuple):
    """What processes tell one another of their shares, `(b,)` int64 each.

    Attributes:
        tokens: of each row.
        since_start: tokens since the last start of a document, or all where none begins.
        restarts: 1 where a document begins.
        plain: 1 where the share is one piece of one document without padding.
    """

    tokens: Tensor
    since_start: Tensor
    restarts: Tensor
    plain: Tensor


def _share(
    tokens: Tensor,
    rows: PackedRows | None,
    position: Tensor,
    group: ContextGroup,
    *,
    is_empty: bool,
) -> tuple[Share, Tensor, Tensor]:
    """See `Share`; and the positions before the share and after all shares, `(b,)` each."""
    zero = torch.zeros_like(position)
    if rows is None:
        length = zero + tokens.shape[1]
        own = _Counts(length, length, zero, zero + 1)
    else:
        _, since_start = rows.positions(zero)
        own = _Counts(rows.count, since_start, rows.is_start.any(1).long(), zero + is_empty)
    counts = _Counts(*group.gather(torch.stack(own)).unbind(1))
    restarts = counts.restarts.bool()
    found = [position]
    for restarted, since in zip(restarts, counts.since_start, strict=True):
        found.append(since + found[-1].masked_fill(restarted, 0))
    plain = bool(counts.plain.all()) and group.size > 1
    shortest = int(counts.tokens[:-1].min()) if plain else 0
    share = Share(group, rows, counts.tokens, restarts, shortest, is_empty)
    return share, found[group.rank], found[-1]
