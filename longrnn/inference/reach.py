"""How many tokens a model can read, asked before anything is read or written."""

from __future__ import annotations

from longrnn.errors import UserError
from longrnn.models import LanguageModel


def out_of_reach(model: LanguageModel, tokens: int) -> str | None:
    """Why a model cannot read so many tokens of one sequence, or None."""
    limit = model.max_length
    if limit is None or tokens <= limit:
        return None
    return (
        f"the model was made for at most {limit:,} tokens and would have read {tokens:,}: give "
        "shorter texts (`longrnn info` says whether CHECKPOINT+beyond lifts the limit)"
    )


def refuse_long(model: LanguageModel, tokens: int) -> None:
    """Refuses so many tokens of one sequence where the model cannot read them.

    Raises:
        UserError: with the length that it can read.
    """
    reason = out_of_reach(model, tokens)
    if reason is not None:
        raise UserError(reason)
