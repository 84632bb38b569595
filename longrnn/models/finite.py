"""Refuses logits that are not finite, and finds the first token with NaN or infinity.

The check costs one reduction over results that exist anyway. Only if it fails are the tokens
processed again.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from typing import NoReturn

import torch
from torch import Tensor, nn

from longrnn.errors import UserError
from longrnn.models.base import LanguageModel
from longrnn.models.segments import CALL_LOGITS
from longrnn.state import LMState, leaves


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


def explain_nonfinite(
    model: LanguageModel, tokens: Tensor, state: LMState | None = None
) -> NoReturn:
    """Raises the `UserError` of `refuse_nonfinite` for tokens whose logits are not all finite."""
    reason = find_nonfinite(model, tokens, state)
    if reason is None:
        reason = f"the model's logits are not finite: {_cause(model)}"
    raise UserError(reason)


def refuse_nonfinite_state(
    model: LanguageModel, tokens: Callable[[], Tensor], before: LMState, after: LMState
) -> None:
    """Refuses tokens whose logits are not finite, judged first by the state after them.

    For calls without logits: tokens and logits are computed only if the state is not finite.

    Raises:
        UserError: names the first token with NaN or infinity.
    """
    real = (leaf for _, leaf in leaves(after.layers) if leaf.is_floating_point())
    if all(bool(leaf.isfinite().all()) for leaf in real):
        return
    if (reason := find_nonfinite(model, tokens(), before)) is not None:
        raise UserError(reason)


@torch.no_grad()
def find_nonfinite(
    model: LanguageModel, tokens: Tensor, state: LMState | None = None
) -> str | None:
    """Describes where NaN or infinity begins, and what to do; None if all logits are finite."""
    state = model.init_state(len(tokens)) if state is None else state
    tokens = tokens.to(state.position.device)
    width = max(1, CALL_LOGITS // max(1, len(tokens) * model.vocab_size))
    for start in range(0, tokens.shape[1], width):
        part = tokens[:, start : start + width]
        logits, after = model(part, state)
        if not bool(logits.isfinite().all()):
            row, position = _first(model, part, state)
            place = f"from token {position:,} on"
            where = place if len(tokens) == 1 else f"in row {row} {place}"
            return f"the model's logits are not finite {where}: {_cause(model)}"
        state = after
    return None


def _first(model: LanguageModel, tokens: Tensor, state: LMState) -> tuple[int, int]:
    """The row and the position of the first token whose logits are not finite."""

    def bad_rows(stop: int) -> Tensor:
        return ~model(tokens[:, :stop], state).logits.isfinite().flatten(1).all(1)

    # Within a chunk, NaN also reaches the tokens before it: only a prefix without it is finite.
    stops = range(1, tokens.shape[1])
    stop = 1 + bisect_left(stops, True, key=lambda stop: bool(bad_rows(stop).any()))
    row = int(bad_rows(stop).nonzero()[0])
    return row, int(state.position[row]) + stop - 1


def _cause(model: LanguageModel) -> str:
    """The probable cause, and what to do."""
    weights = model.named_parameters() if isinstance(model, nn.Module) else ()
    for name, weight in weights:
        if not bool(weight.isfinite().all()):
            return f"its weight {name} is not finite; take an earlier checkpoint"
    return (
        "its values overflow; use a wider dtype (CHECKPOINT+float32, or load(dtype=…)), or shorter "
        "texts"
    )
