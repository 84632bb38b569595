"""Marks where documents begin in packed rows, for the argument `is_document_start` of a model.

Other libraries describe packed rows by `cu_seqlens`, the running sum of the documents' lengths, or
by position ids that restart at 0.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from longrnn.errors import UserError


def document_starts(cu_seqlens: Tensor | Sequence[int], length: int) -> Tensor:
    """Marks the first tokens of the documents of one row, from the documents' bounds.

    `document_starts([0, 3, 5], 5)` is `[[True, False, False, True, False]]`.

    Args:
        cu_seqlens: `(n + 1,)` integers: 0, then the end of each document. An empty document has no
            token to mark.
        length: number of tokens of the row.

    Returns:
        `(1, length)` bool, on the device of `cu_seqlens`.

    Raises:
        UserError: bounds that are not integers, decrease, or do not run from 0 to `length`.
    """
    bounds = torch.as_tensor(cu_seqlens)
    if bounds.ndim != 1 or len(bounds) == 0 or bounds.is_floating_point() or bounds.is_complex():
        raise UserError(
            f"cu_seqlens must be integers of shape (documents + 1,), not {bounds.dtype} of shape "
            f"{tuple(bounds.shape)}: give one row, such as [0, 3, 5]"
        )
    bounds = bounds.long()
    if int(bounds[0]) != 0 or int(bounds[-1]) != length:
        raise UserError(
            f"cu_seqlens runs from {int(bounds[0])} to {int(bounds[-1])}, and the row has {length} "
            "tokens: give bounds that begin with 0 and end with the length of the row"
        )
    if bool((bounds[1:] < bounds[:-1]).any()):
        raise UserError(
            f"cu_seqlens must not decrease, and {bounds.tolist()} does: give running sums of the "
            "lengths of the documents"
        )
    starts = torch.zeros(1, length, dtype=torch.bool, device=bounds.device)
    starts[0, bounds[bounds < length]] = True
    return starts


def document_starts_of_positions(position_ids: Tensor, is_token: Tensor | None = None) -> Tensor:
    """Marks the first tokens of documents, where the position is 0.

    A row whose first position is above 0 continues the document of the state that it is given.

    Args:
        position_ids: `(b, t)` integers; within a document each is one more than that before it.
        is_token: `(b, t)` bool, false at padding, whose positions are not read; None for all true.

    Returns:
        `(b, t)` bool.

    Raises:
        UserError: position ids of another shape or dtype, or a position that neither is 0 nor
            continues its document.
    """
    if position_ids.ndim != 2 or position_ids.is_floating_point() or position_ids.is_complex():
        raise UserError(
            f"position_ids must be integers of shape (batch, time), not {position_ids.dtype} of "
            f"shape {tuple(position_ids.shape)}: give one row per sequence"
        )
    if is_token is None:
        is_token = torch.ones_like(position_ids, dtype=torch.bool)
    if is_token.shape != position_ids.shape or is_token.dtype != torch.bool:
        raise UserError(
            f"is_token must be bool of shape {tuple(position_ids.shape)}, not {is_token.dtype} of "
            f"shape {tuple(is_token.shape)}: give one entry per position"
        )
    starts = (position_ids == 0) & is_token
    # The token before each token, whatever padding lies between them.
    row, time = is_token.nonzero(as_tuple=True)
    positions = position_ids[row, time].long()
    follows = (row[1:] == row[:-1]) & (positions[1:] != 0)
    bad = follows & (positions[1:] != positions[:-1] + 1)
    if len(positions) and (int(positions.min()) < 0 or bool(bad.any())):
        first = int(((positions < 0) | torch.cat([bad.new_zeros(1), bad])).nonzero()[0])
        raise UserError(
            f"position {int(positions[first])} of token {int(time[first])} in row "
            f"{int(row[first])} does not follow from the token before it: give positions that "
            "restart at 0 with each document and grow by 1 within it"
        )
    return starts
