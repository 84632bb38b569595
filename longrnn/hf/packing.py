"""Marks where documents begin in packed rows, for the argument `is_document_start` of `Rows`.

Other libraries describe packed rows by `cu_seqlens`, the running sum of the documents' lengths, or
by position ids that restart at 0.
"""

from __future__ import annotations

import reprlib
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
    is_bounds = bounds.ndim == 1 and len(bounds) > 0 and not bounds.is_floating_point()
    if not is_bounds or bounds[0] != 0 or bounds[-1] != length or bool((bounds.diff() < 0).any()):
        raise UserError(
            f"cu_seqlens of {length} tokens must be integers that grow from 0 to {length}, and is "
            f"{reprlib.repr(bounds.tolist())}: give the running sums of the documents' lengths"
        )
    starts = torch.zeros(1, length, dtype=torch.bool, device=bounds.device)
    starts[0, bounds[bounds < length].long()] = True
    return starts


def document_starts_of_positions(position_ids: Tensor) -> Tensor:
    """Marks the first tokens of documents, where the position is 0.

    A row whose first position is above 0 continues the document of the state that it is given.

    Args:
        position_ids: `(b, t)` integers; within a document each is one more than that before it.

    Returns:
        `(b, t)` bool.

    Raises:
        UserError: a position that neither is 0 nor continues its document.
    """
    starts = position_ids == 0
    follows = torch.ones_like(starts)
    follows[:, 1:] = position_ids.diff() == 1
    wrong = ((position_ids < 0) | ~(starts | follows)).nonzero()
    if len(wrong):
        row, time = wrong[0].tolist()
        raise UserError(
            f"position {int(position_ids[row, time])} of token {time} in row {row} does not follow "
            "from the token before it: give positions that restart at 0 with each document and "
            "grow by 1 within it"
        )
    return starts
