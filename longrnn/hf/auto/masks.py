"""Padding and packed documents in the arguments of Hugging Face models."""

from __future__ import annotations

import torch
from torch import Tensor

from longrnn.errors import UserError


def padding(attention_mask: Tensor | None, tokens: Tensor) -> Tensor | None:
    """`(b, t)` bool, False where a token is padding; None if there is none.

    Args:
        attention_mask: `(b, past + t)`; None for no padding.
        tokens: `(b, t)`.

    Raises:
        UserError: a mask of another shape.
    """
    if attention_mask is None:
        return None
    rows, time = tokens.shape
    fits = attention_mask.ndim == 2 and len(attention_mask) == rows
    if not fits or attention_mask.shape[1] < time:
        raise UserError(
            f"attention_mask has shape {tuple(attention_mask.shape)} and input_ids "
            f"{tuple(tokens.shape)}: give one row per sequence and one column per token, "
            "1 for a token and 0 for padding"
        )
    mask = attention_mask[:, attention_mask.shape[1] - time :].bool()
    return None if bool(mask.all()) else mask


def starts(
    position_ids: Tensor | None, cu_seq_lens: Tensor | None, tokens: Tensor
) -> Tensor | None:
    """`(b, t)` bool, True at the first token of each packed document; None for one per row.

    Args:
        position_ids: `(b, t)` or `(1, t)`: 0 at the first token of a document, one more at each
            further one.
        cu_seq_lens: `(documents + 1,)`, boundaries of the documents of a single row.
        tokens: `(b, t)`.

    Raises:
        UserError: positions that do not count up from 0, or boundaries that do not fit.
    """
    if position_ids is None and cu_seq_lens is None:
        return None
    rows, time = tokens.shape
    found = torch.zeros(rows, time, dtype=torch.bool, device=tokens.device)
    if position_ids is not None:
        if position_ids.ndim != 2 or position_ids.shape[1] != time:
            raise UserError(
                f"position_ids has shape {tuple(position_ids.shape)} and input_ids "
                f"{tuple(tokens.shape)}: give one position per token"
            )
        found = (position_ids == 0).expand(rows, time)
        steps = position_ids[:, 1:] - position_ids[:, :-1]
        if bool(((steps != 1) & (position_ids[:, 1:] != 0)).any()):
            raise UserError(
                "position_ids must count up by 1 and restart at 0 with each document: the state of "
                "a recurrent model cannot skip positions; leave them out for one document per row"
            )
    if cu_seq_lens is not None:
        bounds = cu_seq_lens.tolist()
        if rows != 1 or bounds[:1] != [0] or bounds[-1] != time or bounds != sorted(bounds):
            raise UserError(
                f"cu_seq_lens_q {bounds} does not divide input_ids of shape {tuple(tokens.shape)}: "
                "give one row, and boundaries that rise from 0 to its length"
            )
        marked = torch.zeros_like(found)
        marked[0, [bound for bound in bounds[:-1] if bound < time]] = True
        found = found | marked
    # A row of one document continues the given state.
    return found if bool(found[:, 1:].any()) else None
