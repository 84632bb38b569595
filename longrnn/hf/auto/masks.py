"""Padding and packed documents in the arguments of Hugging Face models."""

from __future__ import annotations

import torch
from torch import Tensor

from longrnn.errors import UserError
from longrnn.hf.auto.packing import document_starts, document_starts_of_positions


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
        UserError: what `longrnn.hf.auto.packing` refuses, or another number of tokens.
    """
    found = torch.zeros_like(tokens, dtype=torch.bool)
    if position_ids is not None:
        if position_ids.shape[1:] != tokens.shape[1:]:
            raise UserError(
                f"position_ids has shape {tuple(position_ids.shape)} and input_ids "
                f"{tuple(tokens.shape)}: give one position per token"
            )
        found = found | document_starts_of_positions(position_ids)
    if cu_seq_lens is not None:
        if len(tokens) != 1:
            raise UserError(
                f"cu_seq_lens_q divides one row, and input_ids has {len(tokens)}: give position_ids"
            )
        found = found | document_starts(cu_seq_lens, tokens.shape[1])
    # A row of one document continues the given state.
    return found if bool(found[:, 1:].any()) else None


def inferred_padding(mask: Tensor, *, continued: bool) -> Tensor:
    """Return the mask that transformers infers from the id of padding, where it can be right.

    Args:
        mask: `(b, t)`, 0 at every padding id of the input.
        continued: whether rows continue a state.

    Raises:
        UserError: padding ids after other tokens, or in rows that continue a state, where they may
            as well be text.
    """
    leading = mask.cumsum(1) == 0
    if bool(((mask == 0) & ~leading).any()) or (continued and bool((mask == 0).any())):
        where = "rows that continue a state" if continued else "rows, after other tokens"
        raise UserError(
            f"input_ids have the pad_token_id in {where}, and no attention_mask says whether it is "
            "padding: give attention_mask, torch.ones_like(input_ids) if all of it is text"
        )
    return mask
