"""Checks of the arguments of a language model."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from longrnn.errors import UserError
from longrnn.ops.rows import Rows
from longrnn.ops.transforms import is_transformed
from longrnn.state import described

if TYPE_CHECKING:
    from longrnn.models.base import LanguageModel


def check_tokens(tokens: Tensor, vocab_size: int, rows: Rows | None = None) -> Tensor:
    """Returns token ids as int64, from any integer dtype.

    Args:
        tokens: `(b, t)` integers.
        vocab_size: number of token ids.
        rows: where padding stands, at which any id is allowed and 0 is returned.

    Raises:
        UserError: not integers of shape `(b, t)` with b >= 1, ids outside the vocabulary, or rows
            of another shape.
    """
    is_integer = isinstance(tokens, Tensor) and not (
        tokens.is_floating_point() or tokens.is_complex() or tokens.dtype == torch.bool
    )
    if not is_integer or tokens.ndim != 2 or not len(tokens):
        raise UserError(
            f"tokens must be integers of shape (batch, time) with a batch of at least 1, not "
            f"{described(tokens)}: give torch.tensor(ids), one row per sequence"
        )
    tokens = tokens.long()
    if rows is not None:
        if rows.shape != tuple(tokens.shape):
            raise UserError(
                f"the rows describe {rows.shape} tokens and {tuple(tokens.shape)} were given: "
                "make Rows from masks of the shape of the tokens"
            )
        tokens = rows.zero_padding(tokens)
    # Reading the ids from another device would wait for it at every token.
    if tokens.numel() and tokens.device.type == "cpu" and not is_transformed():
        low, high = map(int, tokens.aminmax())
        if low < 0 or high >= vocab_size:
            raise UserError(
                f"token id {low if low < 0 else high} is outside the vocabulary of {vocab_size}: "
                "use the tokenizer that this model was trained with"
            )
    return tokens


def out_of_reach(model: LanguageModel, tokens: int) -> str | None:
    """Why a model cannot read a sequence of that many tokens; None if it can."""
    limit = model.max_length
    if limit is None or tokens <= limit:
        return None
    return (
        f"the model was made for at most {limit:,} tokens and would have read {tokens:,}: give "
        "shorter texts (`longrnn info` says whether CHECKPOINT+beyond lifts the limit)"
    )
