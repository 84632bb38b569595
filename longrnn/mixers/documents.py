"""Runs the documents of packed rows as the rows of a batch of their own.

This needs nothing of a cell but that it can be run: each document starts from the state before it,
which is the initial one unless it continues from the call before. Nothing is padded: all documents
run together up to the end of the shortest one, the others up to the end of the next, and so on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TypeVar

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from longrnn.ops.packed_rows import Documents, PackedRows
from longrnn.state import join, reset, take, tree_map

S = TypeVar("S")


def run_documents(
    run: Callable[[Tensor, S], tuple[Tensor, S]], x: Tensor, state: S, fresh: S, rows: PackedRows
) -> tuple[Tensor, S]:
    """Runs each document as a row.

    Args:
        run: maps `(n, t, d)` and the states of n rows to outputs and states.
        x: `(b, t, d)`.
        state: of the b rows before the call.
        fresh: the initial state of one row.
        rows: where documents and padding begin.

    Returns:
        Outputs `(b, t, d')`, 0 at padding, and the states after the last token of each row.
    """
    documents, flat = rows.documents, x.flatten(0, 1)
    current, finished = _before(documents, state, fresh), []
    outputs, places = [], []
    for start, stop, n in _ranges(documents.length):
        place = documents.first[:n, None] + torch.arange(start, stop, device=x.device)
        given = flat.index_select(0, place.flatten()).unflatten(0, place.shape)
        y, current = run(given, tree_map(lambda leaf, n=n: leaf[:n], current))
        outputs.append(y.flatten(0, 1))
        places.append(place.flatten())
        left = int((documents.length > stop).sum())
        finished.append(tree_map(lambda leaf, left=left: leaf[left:], current))
    after = _after(documents, state, join(finished[::-1]))
    return _spread(torch.cat(outputs), torch.cat(places), x), after


def run_packed_sequence(
    run: Callable[[PackedSequence, S], tuple[PackedSequence, S]],
    x: Tensor,
    state: S,
    fresh: S,
    rows: PackedRows,
) -> tuple[Tensor, S]:
    """`run_documents` for the kernels of `torch.nn`, which run documents of any lengths at once."""
    documents, flat = rows.documents, x.flatten(0, 1)
    length = documents.length
    runs = torch.arange(int(length[0]))[:, None] < length  # by time, then by document
    time, document = (index.to(x.device) for index in runs.nonzero(as_tuple=True))
    place = documents.first[document] + time
    packed = PackedSequence(flat.index_select(0, place), runs.sum(1))
    y, after = run(packed, _before(documents, state, fresh))
    return _spread(y.data, place, x), _after(documents, state, after)


def _ranges(length: Tensor) -> Iterator[tuple[int, int, int]]:
    """(start, stop, n): the first n documents have tokens `start` up to `stop`.

    Args:
        length: `(n,)`, largest first.
    """
    start = 0
    for stop in length.unique().tolist():
        yield start, stop, int((length >= stop).sum())
        start = stop


def _before(documents: Documents, state: S, fresh: S) -> S:
    """The state of each document before its first token of the call."""
    own = take(state, documents.row)
    initial = tree_map(lambda leaf: leaf.expand(len(documents.row), *leaf.shape[1:]), fresh)
    return reset(own, initial, documents.begins)


def _after(documents: Documents, state: S, after: S) -> S:
    """The state of each row: that of its last document, or the given one if it has no token."""
    last = documents.last
    row = torch.arange(len(last), device=last.device)
    return take(join([state, after]), torch.where(last < 0, row, len(last) + last))


def _spread(values: Tensor, places: Tensor, x: Tensor) -> Tensor:
    """`(b, t, d)` with `values` `(n, d)` at `places` `(n,)` of `(b · t,)`, and 0 elsewhere."""
    b, t = x.shape[:2]
    spread = values.new_zeros(b * t, values.shape[1])
    return spread.index_copy(0, places, values).view(b, t, -1)
