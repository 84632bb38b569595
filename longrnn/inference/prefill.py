"""Processes long inputs in several calls of a model, so that memory stays bounded."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from longrnn.models import LanguageModel
from longrnn.models.base import MAX_LOGITS
from longrnn.models.finite import explain_nonfinite, refuse_nonfinite_state
from longrnn.progress import Progress
from longrnn.state import LMState

# Tokens per row in one call that returns at most the logits after its last token.
PREFILL_TOKENS = 16384
# Tokens per row in one call that returns all logits.
SCORED_TOKENS = 4096


def scored_tokens(rows: int, vocab_size: int) -> int:
    """Tokens per row of one call that returns all logits, at least 1."""
    return min(SCORED_TOKENS, max(1, MAX_LOGITS // (rows * vocab_size)))


def prefill(
    model: LanguageModel,
    read: Callable[[int, int], Tensor],
    start: int,
    stop: int,
    state: LMState,
    progress: Progress,
    *,
    keep: int = 1,
    items: bool = False,
) -> tuple[Tensor, LMState]:
    """Consumes the tokens from `start` up to `stop` of every row.

    Args:
        model: any language model.
        read: returns the tokens from one position up to another, `(b, t)` int64 on any device.
        start: position of the first token.
        stop: position after the last token; nothing is consumed if it equals `start`.
        state: of `b` rows, before token `start`.
        progress: counts the tokens.
        keep: 1 for the logits after the last token, 0 for none.
        items: whether tokens are also the items of the progress bar.

    Returns:
        The logits after the last token, `(b, v)`, or `(b, 0)` if there are none; and the state.

    Raises:
        UserError: logits that are not finite; names the first such token.
    """
    logits, before = torch.empty(len(state.position), 0), state
    for position in range(start, stop, PREFILL_TOKENS):
        end = min(stop, position + PREFILL_TOKENS)
        tokens = read(position, end).to(state.position.device)
        kept, state = model(tokens, state, keep=keep if end == stop else 0)
        progress.advance(tokens.numel() if items else 0, tokens.numel())
        if keep and end == stop:
            logits = kept[:, -1]
    if not keep and stop > start:
        refuse_nonfinite_state(model, lambda: read(start, stop), before, state)
    if not bool(logits.isfinite().all()):
        explain_nonfinite(model, read(start, stop), before)
    return logits, state
