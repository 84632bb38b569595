"""Brings padded and packed rows into the form that cells read, and outputs back into the given one.

Padding may stand anywhere in a row. The tokens of each row are moved to its left, so that cells see
padding at the end of a row only, and as little of it as possible.
"""

from __future__ import annotations

import torch
from torch import Tensor

from longrnn.errors import UserError
from longrnn.models.checks import check_mask
from longrnn.ops.packed_rows import PackedRows


class Arrangement:
    """Where the tokens of a call stand after all tokens of a row were moved to its left.

    Args:
        tokens: `(b, t)` int64, as given.
        is_token: `(b, t)` bool, false at padding; None for all true.
        is_document_start: `(b, t)` bool; None for all false.

    Attributes:
        tokens: `(b, t')` int64, t' the largest number of tokens of a row.
        rows: where documents and padding begin in them; None if neither occurs.

    Raises:
        UserError: masks of another shape or dtype, or a start at padding.
    """

    def __init__(
        self, tokens: Tensor, is_token: Tensor | None, is_document_start: Tensor | None
    ) -> None:
        self.tokens: Tensor = tokens
        self.rows: PackedRows | None = None
        self._is_token: Tensor | None = None
        self._order: Tensor | None = None
        if (is_token is None and is_document_start is None) or not tokens.numel():
            return
        starts = torch.zeros_like(tokens, dtype=torch.bool)
        if is_document_start is not None:
            starts = check_mask("is_document_start", is_document_start, tokens)
        count = torch.full_like(tokens[:, 0], tokens.shape[1])
        if is_token is not None:
            is_token = check_mask("is_token", is_token, tokens)
            if bool((starts & ~is_token).any()):
                raise UserError(
                    "is_document_start is true at padding, which is not read: set it at the first "
                    "token of the document"
                )
            if not bool(is_token.all()):
                self._is_token, count = is_token, is_token.sum(1)
                order = (~is_token).long().argsort(dim=1, stable=True)[:, : int(count.max())]
                self.tokens, starts = tokens.gather(1, order), starts.gather(1, order)
                self._order = order
        rows = PackedRows(starts, count)
        self.rows = rows if rows.has_starts or rows.has_padding else None

    def arrange(self, values: Tensor) -> Tensor:
        """Moves values `(b, t, d)` to where their tokens are, `(b, t', d)`."""
        if self._order is None:
            return values
        return values.gather(1, self._order[..., None].expand(-1, -1, values.shape[-1]))

    def first_kept(self, keep: int) -> int:
        """The first of the moved tokens among the last `keep` of the given ones, over all rows."""
        if self._is_token is None:
            return self.tokens.shape[1] - keep
        return int(self._is_token[:, : self._is_token.shape[1] - keep].sum(1).min())

    def restore(self, hidden: Tensor, keep: int) -> Tensor:
        """Moves values back to where their tokens were given.

        Args:
            hidden: `(b, t', d)`, of the moved tokens from `first_kept(keep)` on.
            keep: number of given tokens.

        Returns:
            `(b, keep, d)`, 0 at padding.
        """
        if self._is_token is None:
            return hidden
        first, (b, width, d) = self.first_kept(keep), hidden.shape
        start = self._is_token.shape[1] - keep
        index = self._is_token.cumsum(1)[:, start:] - 1 - first
        index = index + width * torch.arange(b, device=index.device)[:, None]
        is_token = self._is_token[:, start:].flatten()
        given = is_token.nonzero()[:, 0]
        values = hidden.flatten(0, 1).index_select(0, index.flatten()[given])
        return hidden.new_zeros(b * keep, d).index_copy(0, given, values).view(b, keep, d)
