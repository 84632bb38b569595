"""Rows that hold several documents, or padding after their last token.

This describes one call of a cell: `(b, t)` tokens of which any may begin a document, with padding
behind the tokens of each row. `longrnn.models.packing` brings other arrangements into this form.
"""

from __future__ import annotations

from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

# More tokens than a document has: stands for a document that began before the call.
BEFORE = 2**53


class Documents(NamedTuple):
    """The documents of a call, and the parts of documents that began before it; longest first.

    Attributes:
        row: `(n,)` int64, the row of each.
        first: `(n,)` int64, index of its first token in `(b · t,)`.
        length: `(n,)` int64 on the CPU, its tokens in this call, at least 1.
        begins: `(n,)` bool, whether it begins in this call.
        last: `(b,)` int64, the last document of each row, or −1 for a row without tokens.
    """

    row: Tensor
    first: Tensor
    length: Tensor
    begins: Tensor
    last: Tensor


class PackedRows:
    """Where documents begin in the rows of a call, and where the padding behind each row begins.

    Args:
        is_start: `(b, t)` bool, true at the first token of a document; false at padding.
        count: `(b,)` int64, tokens of each row; the others, at its end, are padding.

    Attributes:
        has_starts: whether a document begins in this call.
        has_padding: whether a row has padding.
        starts_at_once: whether the first token of a row begins a document.
    """

    def __init__(self, is_start: Tensor, count: Tensor) -> None:
        self.is_start, self.count = is_start, count
        self.has_starts = bool(is_start.any())
        self.starts_at_once = self.has_starts and bool(is_start[:, 0].any())
        self.has_padding = bool((count < is_start.shape[1]).any())

    def slice(self, start: int, stop: int) -> PackedRows | None:
        """The part for tokens `start` up to `stop`; None if they need no special treatment."""
        is_start = self.is_start[:, start:stop]
        part = PackedRows(is_start, (self.count - start).clamp(0, is_start.shape[1]))
        return part if part.has_starts or part.has_padding else None

    @cached_property
    def is_padding(self) -> Tensor:
        """`(b, t)` bool."""
        time = torch.arange(self.is_start.shape[1], device=self.count.device)
        return time >= self.count[:, None]

    @cached_property
    def since_start(self) -> Tensor:
        """`(b, t)` int64, tokens of the same document before each token.

        At least `BEFORE` where the document began before the call.
        """
        time = torch.arange(self.is_start.shape[1], device=self.count.device)
        return time - time.where(self.is_start, -BEFORE).cummax(1).values

    def positions(self, before: Tensor) -> tuple[Tensor, Tensor]:
        """Absolute positions of the tokens, and the position after the last token of each row.

        Args:
            before: `(b,)` int64, the position before the call.

        Returns:
            `(b, t)` int64, 0 at padding, and `(b,)` int64.
        """
        time = torch.arange(self.is_start.shape[1], device=before.device)
        since = self.since_start
        positions = torch.where(since < BEFORE, since, before[:, None] + time)
        positions = positions.masked_fill(self.is_padding, 0)
        last = positions.gather(1, (self.count - 1).clamp(min=0)[:, None])[:, 0]
        return positions, torch.where(self.count > 0, last + 1, before)

    def without_padding(self, values: Tensor) -> Tensor:
        """`values` `(b, t, …)` with zeros at padding."""
        if not self.has_padding:
            return values
        shape = (*self.is_padding.shape, *[1] * (values.ndim - 2))
        return values.masked_fill(self.is_padding.view(shape), 0)

    def near_start(self, reach: int) -> tuple[Tensor, Tensor, Tensor]:
        """The tokens whose last `reach` predecessors do not all belong to their document.

        Returns:
            Rows `(n,)`, times `(n,)`, and `(n,)` the predecessors that do; all int64.
        """
        if reach not in self._near_start:
            row, time = (self.since_start < reach).nonzero(as_tuple=True)
            self._near_start[reach] = row, time, self.since_start[row, time]
        return self._near_start[reach]

    @cached_property
    def _near_start(self) -> dict[int, tuple[Tensor, Tensor, Tensor]]:
        return {}

    @cached_property
    def documents(self) -> Documents:
        """See `Documents`."""
        # On the CPU, because the loops over documents need their lengths.
        is_start, count = self.is_start.cpu(), self.count.cpu()
        begins = is_start.clone()
        begins[:, 0] |= count > 0
        row, time = begins.nonzero(as_tuple=True)
        end = count[row]
        end[:-1] = torch.where(row[1:] == row[:-1], time[1:], end[:-1])
        length, order = (end - time).sort(descending=True, stable=True)
        last = torch.full_like(count, -1)
        # Documents are in the order of the text, so that the largest index of a row is its last.
        last.scatter_reduce_(0, row, torch.arange(len(row)), "amax")
        rank = torch.empty_like(order).scatter_(0, order, torch.arange(len(order)))
        last = torch.where(last < 0, last, rank[last.clamp(min=0)]) if len(rank) else last
        row, time, device = row[order], time[order], self.count.device
        first = row * is_start.shape[1] + time
        return Documents(
            row.to(device),
            first.to(device),
            length,
            is_start[row, time].to(device),
            last.to(device),
        )
