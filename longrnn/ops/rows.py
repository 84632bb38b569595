"""Rows of a call that hold several documents, or padding.

Padding may stand anywhere in a row. The model moves the tokens of each row to its left (`arrange`),
so that cells see padding at the end of a row only, and moves its outputs back (`restore`).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from itertools import pairwise
from typing import TypeVar

import torch
from torch import Tensor

from longrnn.errors import UserError
from longrnn.state import reset

S = TypeVar("S")
# Stands for the tokens since the start of a document that began before the call.
MORE_THAN_ANY_DOCUMENT = 2**53


class Rows:
    """Where documents begin in the rows of a call, and where padding stands.

    Args:
        is_token: `(b, t)` bool, false at padding; None for no padding.
        is_document_start: `(b, t)` bool, true at the first token of a document; None for no start.
            Before such a token its row has the initial state. A row whose first token is
            not a start continues the given state.

    Attributes:
        shape: `(b, t)` of the given masks.
        is_start: `(b, t')` bool, after the tokens of each row were moved to its left; t' is the
            largest number of tokens of a row, and at least 1.
        count: `(b,)` int64, the tokens of each row; what follows them is padding.
        has_starts: whether a document begins in this call.
        has_padding: whether a row has padding.

    Raises:
        UserError: a mask that is not bool `(b, t)`, masks of two shapes, or a start at padding.
    """

    def __init__(
        self, is_token: Tensor | None = None, is_document_start: Tensor | None = None
    ) -> None:
        masks = {"is_token": is_token, "is_document_start": is_document_start}
        given = {name: mask for name, mask in masks.items() if mask is not None}
        for name, mask in given.items():
            if not isinstance(mask, Tensor) or mask.dtype != torch.bool or mask.ndim != 2:
                raise UserError(
                    f"{name} must be a bool tensor of shape (batch, time): give one entry per "
                    "token, for example attention_mask.bool()"
                )
        if not given or len({mask.shape for mask in given.values()}) > 1:
            shapes = [tuple(mask.shape) for mask in given.values()]
            raise UserError(
                f"rows need is_token or is_document_start, in one shape, and have {shapes}: give "
                "one entry per token in each"
            )
        like = next(iter(given.values()))
        starts = torch.zeros_like(like) if is_document_start is None else is_document_start
        self._is_token, self._order = None, None
        count = torch.full((len(like),), like.shape[1], device=like.device)
        if is_token is not None and not bool(is_token.all()):
            if bool((starts & ~is_token).any()):
                raise UserError(
                    "is_document_start is true at padding, which is not read: set it at the first "
                    "token of the document"
                )
            self._is_token, count = is_token, is_token.sum(1)
            # A call of padding alone has one column: shards need every process to call the blocks.
            width = max(1, int(count.max()))
            self._order = (~is_token).long().argsort(dim=1, stable=True)[:, :width]
            starts = starts.gather(1, self._order)
        self.shape = tuple(like.shape)
        self._set(starts, count)

    def _set(self, is_start: Tensor, count: Tensor) -> None:
        self.is_start, self.count = is_start, count
        self.has_starts = bool(is_start.any())
        self.has_padding = bool((count < is_start.shape[1]).any())

    @classmethod
    def _moved(cls, is_start: Tensor, count: Tensor) -> Rows:
        """Rows with padding at their ends only, from `is_start` and `count`."""
        rows = object.__new__(cls)
        rows.shape = tuple(is_start.shape)
        rows._is_token, rows._order = None, None
        rows._set(is_start, count)
        return rows

    def slice(self, start: int, stop: int) -> Rows | None:
        """The part for moved tokens `start` up to `stop`; None if nothing about them is special."""
        is_start = self.is_start[:, start:stop]
        part = self._moved(is_start, (self.count - start).clamp(0, is_start.shape[1]))
        return part if part.has_starts or part.has_padding else None

    def doubled(self) -> Rows:
        """The rows in which a moved token occupies two positions; the first may be a start."""
        is_start = torch.stack([self.is_start, torch.zeros_like(self.is_start)], 2).flatten(1)
        return self._moved(is_start, 2 * self.count)

    def zero_padding(self, tokens: Tensor) -> Tensor:
        """Tokens `(b, t)` with 0 at padding."""
        return tokens if self._is_token is None else tokens.masked_fill(~self._is_token, 0)

    def arrange(self, values: Tensor) -> Tensor:
        """Moves tokens `(b, t)` or vectors `(b, t, d)` to the left of their rows."""
        if self._order is None:
            return values
        index = self._order.view(*self._order.shape, *[1] * (values.ndim - 2))
        return values.gather(1, index.expand(-1, -1, *values.shape[2:]))

    def first_kept(self, keep: int) -> int:
        """The first of the moved tokens among the last `keep` of the given ones, over all rows."""
        if self._is_token is None:
            return self.shape[1] - keep
        return int(self._is_token[:, : self.shape[1] - keep].sum(1).min())

    def restore(self, hidden: Tensor, keep: int) -> Tensor:
        """Moves vectors back to where their tokens were given.

        Args:
            hidden: `(b, t', d)`, of the moved tokens from `first_kept(keep)` on.
            keep: number of given tokens.

        Returns:
            `(b, keep, d)`, 0 at padding.
        """
        if self._is_token is None:
            return hidden
        index = self._is_token.cumsum(1) - 1 - self.first_kept(keep)
        index = index[:, self.shape[1] - keep :]
        is_token = self._is_token[:, self.shape[1] - keep :]
        index = index.clamp(0, max(0, hidden.shape[1] - 1))[..., None]
        if not hidden.shape[1]:
            return hidden.new_zeros(len(hidden), keep, hidden.shape[2])
        restored = hidden.gather(1, index.expand(-1, -1, hidden.shape[2]))
        return torch.where(is_token[..., None], restored, 0)

    @cached_property
    def is_padding(self) -> Tensor:
        """`(b, t')` bool."""
        time = torch.arange(self.is_start.shape[1], device=self.count.device)
        return time >= self.count[:, None]

    @cached_property
    def since_start(self) -> Tensor:
        """`(b, t')` int64, tokens of the same document before each token.

        At least `MORE_THAN_ANY_DOCUMENT` where the document began before the call.
        """
        time = torch.arange(self.is_start.shape[1], device=self.count.device)
        return time - time.where(self.is_start, -MORE_THAN_ANY_DOCUMENT).cummax(1).values

    def positions(self, before: Tensor) -> tuple[Tensor, Tensor]:
        """Absolute positions of the tokens, and the position after the last token of each row.

        Args:
            before: `(b,)` int64, the position before the call.

        Returns:
            `(b, t')` int64, 0 at padding, and `(b,)` int64.
        """
        time = torch.arange(self.is_start.shape[1], device=before.device)
        since = self.since_start
        positions = torch.where(since < MORE_THAN_ANY_DOCUMENT, since, before[:, None] + time)
        positions = positions.masked_fill(self.is_padding, 0)
        last = positions.gather(1, (self.count - 1).clamp(min=0)[:, None])[:, 0]
        return positions, torch.where(self.count > 0, last + 1, before)

    def without_padding(self, values: Tensor) -> Tensor:
        """`values` `(b, t', …)` with zeros at padding."""
        if not self.has_padding:
            return values
        shape = (*self.is_padding.shape, *[1] * (values.ndim - 2))
        return values.masked_fill(self.is_padding.view(shape), 0)

    def last(self, values: Tensor, count: int) -> Tensor:
        """The last `count` values of each row's last document; 0 before its start.

        Args:
            values: `(b, l + t', …)`, with those of the l tokens before the call in front.
            count: how many.
        """
        ahead = values.shape[1] - self.is_start.shape[1] - count
        place = torch.arange(count, device=values.device)
        index = ahead + self.count[:, None] + place
        # A row without tokens keeps its values, though a document begins at none of its tokens.
        since = self.since_start.gather(1, (self.count - 1).clamp(min=0)[:, None])
        missing = (index < 0) | (count - 1 - place > since)
        shape = (len(values), count, *[1] * (values.ndim - 2))
        index = index.clamp(min=0).view(shape).expand(-1, -1, *values.shape[2:])
        return torch.where(missing.view(shape), 0, values.gather(1, index))


def positions_of(before: Tensor, time: int, rows: Rows | None) -> tuple[Tensor, Tensor]:
    """Absolute positions of tokens, and the position after the last token of each row.

    Args:
        before: `(b,)` int64, the position before the call.
        time: number of tokens of each row.
        rows: where documents and padding begin; None for rows of one document without padding.

    Returns:
        `(b, t)` int64, see `Rows.positions`, and `(b,)` int64.
    """
    if rows is not None:
        return rows.positions(before)
    return before[:, None] + torch.arange(time, device=before.device), before + time


def run_documents(
    run: Callable[[Tensor, S], tuple[Tensor, S]], x: Tensor, state: S, initial: S, rows: Rows
) -> tuple[Tensor, S]:
    """Runs all rows up to the next token at which a document or padding begins in one of them.

    Every cell can do this: between two such tokens there is one document per row.

    Args:
        run: maps `(b, t, d)` and the states of the rows to outputs and states.
        x: `(b, t, d)`.
        state: of the b rows before the call.
        initial: the initial state of the b rows.
        rows: where documents and padding begin.

    Returns:
        Outputs `(b, t, d')`, 0 at padding, and the states after the last token of each row.
    """
    starts = rows.is_start.any(0).nonzero()[:, 0].tolist()
    cuts = sorted({0, *starts, *rows.count.tolist(), x.shape[1]})
    outputs = []
    for first, stop in pairwise(cuts):
        before = reset(state, initial, rows.is_start[:, first])
        y, after = run(x[:, first:stop], before)
        # Padding changes no state.
        state = reset(after, state, rows.count <= first)
        outputs.append(y)
    return rows.without_padding(torch.cat(outputs, dim=1)), state
