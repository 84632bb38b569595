"""Refuses logits that are not finite, and finds the first token with NaN or infinity.

The check costs one reduction over results that exist anyway. Only if it fails are the tokens
processed again, to find where it begins.
"""

from typing import NoReturn

import torch
from torch import Tensor, nn

from longrnn.errors import UserError
from longrnn.models.base import LanguageModel
from longrnn.state import LMState

# Tokens of a call in the search: a position is exact to the chunk that a kernel computes at once,
# unless the call ends before it.
STEP = 16


def refuse_nonfinite(
    values: Tensor, model: LanguageModel, tokens: Tensor, state: LMState | None = None
) -> None:
    """Refuses logits that are not finite.

    Args:
        values: logits of `model`, or values computed from them, such as losses.
        model: any language model.
        tokens: `(b, t)`, the tokens that gave the values.
        state: the state before them; None for the empty state.

    Raises:
        UserError: names the first token with NaN or infinity.
    """
    if not bool(values.isfinite().all()):
        explain_nonfinite(model, tokens, state)


@torch.no_grad()
def explain_nonfinite(
    model: LanguageModel, tokens: Tensor, state: LMState | None = None
) -> NoReturn:
    """Raises the `UserError` of `refuse_nonfinite` for tokens whose logits are not all finite."""
    after = model.init_state(len(tokens)) if state is None else state
    first = _first_nonfinite(model, tokens.to(after.position.device), after, STEP)
    place = "" if first is None else f" from token {first:,} on"
    raise UserError(f"the model's logits are not finite{place}: {cause_of_nonfinite(model)}")


def _first_nonfinite(
    model: LanguageModel, tokens: Tensor, state: LMState, width: int
) -> int | None:
    """The position of the first token with NaN or infinity, read in calls of `width` tokens."""
    for part in tokens.split(width, dim=1):
        logits, after = model(part, state)
        bad = ~logits.isfinite().flatten(1).all(1)
        if bool(bad.any()):
            # One by one: in a call, NaN may reach the tokens before it that are computed with it.
            first = _first_nonfinite(model, part, state, 1) if width > 1 else None
            return int(state.position[bad].min()) if first is None else first
        state = after
    return None


def cause_of_nonfinite(model: nn.Module) -> str:
    """Why logits of a model are not finite, and what to do."""
    for name, weight in model.named_parameters():
        if weight.is_floating_point() and not bool(weight.isfinite().all()):
            wider = "" if bool(weight.isnan().any()) else ", or load it with a wider dtype"
            return (
                f"its weight {name} has NaN or infinite values; copy the checkpoint again, or take "
                f"an earlier one{wider}"
            )
    return (
        "its values overflow; use a wider dtype (CHECKPOINT+float32, or load(dtype=…)), or shorter "
        "texts"
    )
