"""Streams: documents end to end in the rows of a batch, in an order that is a pure function.

Row b of consecutive batches reads one document segment by segment, then the next document of its
stream. A document belongs to one stream for the whole run; longest first, each goes to the stream
that is shortest so far. When a stream has read its documents, it reads them again in another
order: each stream has its own epochs, and no stream waits for another.

A segment of length L consumes L tokens and predicts the L tokens that follow each of them, so a
document of n tokens gives (n − 1) // L segments. What is left at its end, fewer than L tokens to
predict, is dropped: no row is ever padded, so no padding can reach a state.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from longrnn.errors import UserError


class Place(NamedTuple):
    """A segment: `document`, its first token `start`, and whether it begins the document."""

    document: int
    start: int
    is_document_start: bool


class Streams:
    """The documents of a run in `n_streams` streams.

    Args:
        lengths: tokens of every document.
        n_streams: rows of the batch of all processes together.
        length: tokens of a segment.
        max_segments: longer documents are cut into parts of at most as many segments and nearly
            equal size, each of which is a document of its own; None for no limit.
        seed: determines the order.

    Attributes:
        epochs: for each stream, the segments of one epoch.
        documents: number of (parts of) documents in all streams.
        dropped_documents: number of documents too short for one segment.
        dropped_tokens: predictions that no segment makes, in these documents and at the ends of
            the others.

    Raises:
        UserError: there are fewer documents than streams.
    """

    def __init__(
        self,
        lengths: Sequence[int] | NDArray[np.int64],
        *,
        n_streams: int,
        length: int,
        max_segments: int | None,
        seed: int,
    ) -> None:
        self.length, self.seed = length, seed
        targets = np.asarray(lengths, dtype=np.int64) - 1
        segments = targets // length
        document, first, size = _parts(segments, max_segments)
        self.documents = len(size)
        self.dropped_documents = int((segments == 0).sum())
        self.dropped_tokens = int((targets - segments * length).sum())
        if self.documents < n_streams:
            raise UserError(_too_few(segments, self.documents, n_streams, length))
        stream_of = _share_out(size, n_streams, seed)
        # A stream's documents: (which, first token, segments), three rows.
        table = np.stack([document, first * length, size])
        by_stream = np.argsort(stream_of, kind="stable")
        cuts = np.cumsum(np.bincount(stream_of, minlength=n_streams))[:-1]
        self._streams = [table[:, members] for members in np.split(by_stream, cuts)]
        self.epochs = [int(stream[2].sum()) for stream in self._streams]
        self._orders: dict[int, tuple[int, list[int], NDArray[np.int64]]] = {}

    def place(self, stream: int, step: int) -> Place:
        """The segment that a stream reads at a step."""
        epoch, index = divmod(step, self.epochs[stream])
        order, ends = self._order(stream, epoch)
        turn = int(np.searchsorted(ends, index, side="right"))
        document, start, size = self._streams[stream][:, order[turn]].tolist()
        within = index - (int(ends[turn]) - size)
        return Place(document, start + within * self.length, within == 0)

    def _order(self, stream: int, epoch: int) -> tuple[list[int], NDArray[np.int64]]:
        """A stream's documents in the order of an epoch, and where each ends."""
        known = self._orders.get(stream)
        if known is None or known[0] != epoch:
            order = list(range(self._streams[stream].shape[1]))
            random.Random(f"{self.seed}/{stream}/{epoch}").shuffle(order)
            known = epoch, order, np.cumsum(self._streams[stream][2][order])
            self._orders[stream] = known
        return known[1:]


def _parts(
    segments: NDArray[np.int64], max_segments: int | None
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Document, first segment and segments of every part, in the order of the documents."""
    longest = max(1, int(segments.max(initial=0)))
    counts = -(-segments // (max_segments or longest))  # parts of each document, 0 where too short
    document = np.repeat(np.arange(len(segments)), counts)
    number = np.arange(len(document)) - np.repeat(np.cumsum(counts) - counts, counts)
    first = segments[document] * number // counts[document]
    after = segments[document] * (number + 1) // counts[document]
    return document, first, after - first


def _share_out(size: NDArray[np.int64], n_streams: int, seed: int) -> NDArray[np.int64]:
    """The stream of every part: longest first, each to the stream that is shortest so far.

    Parts of equal size are ordered by the seed.
    """
    order = list(range(len(size)))
    # The word in the seed is part of the order: another one would lay out other streams.
    random.Random(f"{seed}/lanes").shuffle(order)
    order.sort(key=size.tolist().__getitem__, reverse=True)
    stream_of = np.zeros(len(size), dtype=np.int64)
    loads = [(0, stream) for stream in range(n_streams)]
    for part in order:
        load, stream = loads[0]
        stream_of[part] = stream
        heapq.heapreplace(loads, (load + int(size[part]), stream))
    return stream_of


def _too_few(segments: NDArray[np.int64], documents: int, n_streams: int, length: int) -> str:
    total = int(segments.sum())
    message = (
        f"{documents:,} documents have a segment of {length:,} tokens and there are "
        f"{n_streams:,} streams (rows of all processes and micro-batches): "
    )
    if total < n_streams:
        return message + f"use at most {total:,} streams, or a smaller length.max"
    return message + (
        f"use fewer streams, or cut long documents with task.max_segments={total // n_streams} or "
        "less"
    )
