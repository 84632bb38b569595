"""Checks, before anything is computed or written, that a text is not too long for a model."""

from __future__ import annotations

from longrnn.errors import UserError
from longrnn.models import LanguageModel


def out_of_reach(model: LanguageModel, tokens: int) -> str | None:
    """Why a model cannot read a sequence of that many tokens; None if it can."""
    limit = model.max_length
    if limit is None or tokens <= limit:
        return None
    return (
        f"the model was made for at most {limit:,} tokens and would have read {tokens:,}: give "
        "shorter texts (`longrnn info` says whether CHECKPOINT+beyond lifts the limit)"
    )


def refuse_long(model: LanguageModel, tokens: int) -> None:
    """Refuses a sequence of more tokens than a model can read.

    Raises:
        UserError: names the limit of the model.
    """
    reason = out_of_reach(model, tokens)
    if reason is not None:
        raise UserError(reason)
