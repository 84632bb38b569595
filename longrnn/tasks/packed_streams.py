"""Streams whose segments hold several documents.

- `PackedStreams`: documents follow each other within segments, and nothing is dropped. A document
  of n tokens takes n − 1 places, each of which predicts the next token of the same document.
- `WholeDocuments`: every row holds whole documents, as many as fit; the rest of it is padding.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from longrnn.tasks.streams import Layout, Whole, shuffled


class Piece(NamedTuple):
    """A part of a packed row: `size` tokens of `document` from `start` on.

    `is_document_start`: whether the row reads the document from here, and not its continuation.
    """

    document: int
    start: int
    size: int
    is_document_start: bool


class PackedStreams(Layout):
    """Segments of streams in which documents follow each other without gaps.

    Args:
        lengths: tokens of every document.
        n_streams: rows of the batch of all processes together.
        length: tokens of a segment.
        max_segments: longer documents are cut into parts of at most as many times `length` tokens.
        seed: determines the order.

    Attributes:
        epochs: for each stream, the predicted tokens of one epoch.

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
        most = None if max_segments is None else max_segments * length
        super().__init__(targets, n_streams=n_streams, most=most, seed=seed)

    def pieces(self, stream: int, step: int) -> list[Piece]:
        """What a stream reads at a step, `length` tokens in all."""
        epoch, index = divmod(step * self.length, self.epochs[stream])
        pieces: list[Piece] = []
        missing = self.length
        while missing:
            table, ends = self.order(stream, epoch)
            turn = int(np.searchsorted(ends, index, side="right"))
            while missing and turn < len(ends):
                document, first, size = table[:, turn].tolist()
                within = index - (int(ends[turn]) - size)
                taken = min(size - within, missing)
                pieces.append(Piece(document, first + within, taken, within == 0))
                missing, index, turn = missing - taken, index + taken, turn + 1
            epoch, index = epoch + 1, 0
        return pieces

    def too_few(self, total: int, n_streams: int) -> str:
        message = (
            f"{self.documents:,} documents have two tokens or more and there are {n_streams:,} "
            "streams (rows of all processes and micro-batches): "
        )
        if total < n_streams * self.length:
            return message + "use fewer streams, or give more text"
        return message + (
            "use fewer streams, or cut long documents with task.max_segments="
            f"{total // (n_streams * self.length)} or less"
        )


class WholeDocuments(Layout):
    """Rows of whole documents, in streams whose unit is a row.

    Documents go into rows in a random order, each into the same row as the one before while it
    fits. The rows are the same in every epoch, in another order: documents of a row do not see each
    other, so it does not matter which they are.

    Args:
        sizes: places of every document, at most `most`; those of size 0 are left out.
        n_streams: rows of the batch of all processes together.
        most: places of a row; 0 for one document per row.
        seed: determines the order.

    Attributes:
        documents: number of rows.

    Raises:
        UserError: there are fewer rows than streams.
    """

    def __init__(self, sizes: Whole, *, n_streams: int, most: int, seed: int) -> None:
        order = shuffled(len(sizes), f"{seed}/rows")
        self._order = order[sizes[order] > 0]
        self._sizes = sizes
        ends = np.cumsum(sizes[self._order]).tolist()
        cuts = [0]
        while cuts[-1] < len(ends):
            before = ends[cuts[-1] - 1] if cuts[-1] else 0
            cuts.append(max(cuts[-1] + 1, bisect_right(ends, before + most, cuts[-1])))
        self._cuts, self._packs = cuts, most > 0
        rows = np.ones(len(cuts) - 1, dtype=np.int64)
        super().__init__(rows, n_streams=n_streams, most=None, seed=seed)

    def pieces(self, stream: int, step: int) -> list[Piece]:
        """What a stream reads at a step."""
        epoch, index = divmod(step, self.epochs[stream])
        row = int(self.order(stream, epoch)[0][0, index])
        documents = self._order[self._cuts[row] : self._cuts[row + 1]].tolist()
        return [Piece(document, 0, int(self._sizes[document]), True) for document in documents]

    def too_few(self, total: int, n_streams: int) -> str:
        remedy = "use fewer rows per step, or give more data"
        if self._packs and len(self._order) >= n_streams:
            remedy = "use fewer rows per step, or set task.packing=false"
        return (
            f"all documents fit into {total:,} rows, and a step has {n_streams:,} (rows of all "
            f"processes and micro-batches): {remedy}"
        )
