"""Streams: documents end to end in the rows of a batch, in an order that is a pure function.

Row b of consecutive batches reads the documents of its stream, segment by segment. A document
belongs to one stream for the whole run; longest first, each goes to the stream that is shortest so
far. When a stream has read its documents, it reads them again in another order: each stream has its
own epochs, and no stream waits for another.

- `Streams`: every segment is within one document. A segment of length L consumes L tokens and
  predicts the L tokens that follow each of them, so a document of n tokens gives (n − 1) // L
  segments, and what is left at its end, fewer than L tokens to predict, is dropped.
- `PackedStreams` and `WholeDocuments`, in `longrnn.tasks.packed_streams`: documents share segments.

Notable choice: beyond `LISTED` documents, orders are drawn and documents are distributed by NumPy
and not one by one: a million take about a tenth of a second of one core. Below, the
layout is that of earlier versions.
"""

from __future__ import annotations

import hashlib
import heapq
import random
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from longrnn.errors import UserError

# At most this many documents are ordered and distributed one by one.
LISTED = 4096
Whole: TypeAlias = NDArray[np.int64]


class Place(NamedTuple):
    """A segment: `document`, its first token `start`, and whether it begins the document."""

    document: int
    start: int
    is_document_start: bool


class Layout(ABC):
    """Documents in `n_streams` streams, each with an order of its own in every epoch.

    Args:
        sizes: of every document, in units that the streams have in common; one of size 0 is left
            out.
        n_streams: rows of the batch of all processes together.
        most: larger documents are cut into parts of at most this size and nearly equal size, each
            of which is a document of its own; None for no limit.
        seed: determines the order.

    Attributes:
        epochs: for each stream, the sum of the sizes of one epoch.
        documents: number of (parts of) documents in all streams.

    Raises:
        UserError: there are fewer documents than streams.
    """

    def __init__(self, sizes: Whole, *, n_streams: int, most: int | None, seed: int) -> None:
        self.seed = seed
        document, first, size = _parts(sizes, most)
        self.documents = len(size)
        if self.documents < n_streams:
            raise UserError(self.too_few(int(sizes.sum()), n_streams))
        stream_of = _share_out(size, n_streams, seed)
        self._parts = document, first, size
        # NumPy sorts the narrowest type fastest.
        narrow = stream_of.astype(np.min_scalar_type(n_streams - 1))
        counts = np.bincount(stream_of, minlength=n_streams)
        self._members = np.split(np.argsort(narrow, kind="stable"), np.cumsum(counts)[:-1])
        epochs = np.bincount(stream_of, weights=size, minlength=n_streams)  # exact below 2**53
        self.epochs = [int(units) for units in epochs]
        self._orders: dict[int, tuple[int, Whole, Whole]] = {}

    @abstractmethod
    def too_few(self, total: int, n_streams: int) -> str:
        """The message for fewer documents than streams, where all sizes sum to `total`."""

    def order(self, stream: int, epoch: int) -> tuple[Whole, Whole]:
        """A stream's documents in the order of an epoch, and the units up to the end of each.

        Returns:
            `(3, documents)`: which document, its first unit, its size; and `(documents,)`.
        """
        known = self._orders.get(stream)
        if known is None or known[0] != epoch:
            members = self._members[stream]
            members = members[shuffled(len(members), f"{self.seed}/{stream}/{epoch}")]
            table = np.stack([column[members] for column in self._parts])
            known = epoch, table, np.cumsum(table[2])
            self._orders[stream] = known
        return known[1:]


class Streams(Layout):
    """Segments of streams, each within one document.

    Args:
        lengths: tokens of every document.
        n_streams: rows of the batch of all processes together.
        length: tokens of a segment.
        max_segments: the largest number of segments of a document; longer ones are cut.
        seed: determines the order.

    Attributes:
        epochs: for each stream, the segments of one epoch.
        dropped_documents: number of documents too short for one segment.
        dropped_tokens: predictions that no segment makes, in these documents and at the ends of
            the others.

    Raises:
        UserError: there are fewer documents than streams.
    """

    def __init__(
        self,
        lengths: Sequence[int] | Whole,
        *,
        n_streams: int,
        length: int,
        max_segments: int | None,
        seed: int,
    ) -> None:
        self.length = length
        targets = np.asarray(lengths, dtype=np.int64) - 1
        segments = targets // length
        self.dropped_documents = int((segments == 0).sum())
        self.dropped_tokens = int((targets - segments * length).sum())
        super().__init__(segments, n_streams=n_streams, most=max_segments, seed=seed)

    def place(self, stream: int, step: int) -> Place:
        """The segment that a stream reads at a step."""
        epoch, index = divmod(step, self.epochs[stream])
        table, ends = self.order(stream, epoch)
        turn = int(np.searchsorted(ends, index, side="right"))
        document, first, size = table[:, turn].tolist()
        within = index - (int(ends[turn]) - size)
        return Place(document, (first + within) * self.length, within == 0)

    def too_few(self, total: int, n_streams: int) -> str:
        message = (
            f"{self.documents:,} documents have a segment of {self.length:,} tokens and there are "
            f"{n_streams:,} streams (rows of all processes and micro-batches): "
        )
        if total < n_streams:
            return message + f"use at most {total:,} streams, or a smaller length.max"
        return message + (
            "use fewer streams, or cut long documents with task.max_segments="
            f"{total // n_streams} or less"
        )


def shuffled(n: int, word: str) -> Whole:
    """0 up to n in an order that `word` determines, on every machine."""
    if n <= LISTED:
        order = list(range(n))
        random.Random(word).shuffle(order)
        return np.array(order, dtype=np.int64)
    seed = np.frombuffer(hashlib.sha256(word.encode()).digest(), "<u4")
    # NumPy does not change the sequence of its legacy generator.
    return np.random.RandomState(seed).permutation(n).astype(np.int64, copy=False)


def _parts(sizes: Whole, most: int | None) -> tuple[Whole, Whole, Whole]:
    """Document, first unit and size of every part, in the order of the documents."""
    if most is None or int(sizes.max(initial=0)) <= most:
        document = np.flatnonzero(sizes > 0)
        return document, np.zeros_like(document), sizes[document]
    counts = -(-sizes // most)  # parts of each document, 0 for one of size 0
    document = np.repeat(np.arange(len(sizes)), counts)
    number = np.arange(len(document)) - np.repeat(np.cumsum(counts) - counts, counts)
    first = sizes[document] * number // counts[document]
    after = sizes[document] * (number + 1) // counts[document]
    return document, first, after - first


def _share_out(size: Whole, n_streams: int, seed: int) -> Whole:
    """The stream of every part: longest first, each to the stream that is shortest so far.

    Parts of equal size are ordered by the seed. Of more than `LISTED` parts, the longest go one by
    one, and the streams are then filled up to one level with the others.
    """
    # The word in the seed is part of the order: another one would lay out other streams.
    order = shuffled(len(size), f"{seed}/lanes")
    singly = max(LISTED, n_streams)
    rest = order[:0]
    if len(order) > singly:
        ranked = size[order]
        least = int(np.partition(ranked, -singly)[-singly])
        is_long = ranked > least
        # Ties are decided by the order, because sorting may decide them in another way elsewhere.
        is_long[np.flatnonzero(ranked == least)[: singly - int(is_long.sum())]] = True
        order, rest = order[is_long], order[~is_long]
    order = order[np.argsort(-size[order], kind="stable")]
    stream_of = np.zeros(len(size), dtype=np.int64)
    loads = [(0, stream) for stream in range(n_streams)]
    for part, units in zip(order.tolist(), size[order].tolist(), strict=True):
        load, stream = loads[0]
        stream_of[part] = stream
        heapq.heapreplace(loads, (load + units, stream))
    if len(rest):
        _fill_up(stream_of, size, rest, sorted(loads))
    return stream_of


def _fill_up(stream_of: Whole, size: Whole, rest: Whole, loads: list[tuple[int, int]]) -> None:
    """Gives each stream consecutive parts of `rest`, so that all end at about the same load.

    Args:
        stream_of: the stream of every part, filled in for those of `rest`.
        size: of every part.
        rest: the parts, in a random order.
        loads: (load, stream), sorted.
    """
    load = np.array([one for one, _ in loads])
    ends = np.cumsum(size[rest])
    # Streams below a common level are filled up to it; what is left is one unit for some of them.
    level = int(((int(ends[-1]) + np.cumsum(load)) // np.arange(1, len(load) + 1)).min())
    room = (level - load).clip(min=0)
    room[: int(ends[-1] - room.sum())] += 1
    room = np.cumsum(room)
    # A part goes where its middle falls.
    cuts = np.searchsorted(2 * ends - size[rest], 2 * room[:-1])
    counts = np.diff(cuts, prepend=0, append=len(rest))
    stream_of[rest] = np.repeat([stream for _, stream in loads], counts)
