"""How many tokens a model can read, asked before anything is read or written."""

from __future__ import annotations

import torch

from longrnn.errors import UserError
from longrnn.models import LanguageModel


@torch.no_grad()
def out_of_reach(model: LanguageModel, tokens: int) -> str | None:
    """Why a model cannot read so many tokens, or None.

    A position comes from the state alone, so one token at the last position tells.
    """
    # A transformer knows its limit, and its cache cannot be at a position that it has not read.
    limit = getattr(model, "max_length", 0)
    if limit is None or tokens <= limit:
        return None
    state = model.init_state(1)
    token = torch.zeros(1, 1, dtype=torch.long, device=state.position.device)
    try:
        model(token, state._replace(position=state.position + tokens - 1), keep=0)
    except UserError as error:
        return str(error)
    return None


def refuse_long(model: LanguageModel, tokens: int) -> None:
    """Refuses so many tokens of one sequence where the model would.

    Raises:
        UserError: with the model's own reason.
    """
    reason = out_of_reach(model, tokens)
    if reason is not None:
        raise UserError(reason)
