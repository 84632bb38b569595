"""Long inputs in several calls of a model, so that memory stays bounded at any length."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from longrnn.models import LanguageModel
from longrnn.models.finite import explain_nonfinite, refuse_nonfinite_state
from longrnn.progress import Progress
from longrnn.state import LMState

# Tokens per row in one call that wants no logits, or those after its last token only.
PREFILL = 16384
# Tokens per row in one call whose logits are all scored.
SCORED = 4096
# Logits, over all rows and tokens, that one call may hold.
LOGITS = 2**25


def scored_tokens(rows: int, vocab_size: int) -> int:
    """Tokens per row of a call that scores every logit, at least 1."""
    return min(SCORED, max(1, LOGITS // (rows * vocab_size)))


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
    """Consumes tokens `start` up to `stop` of every row.

    Args:
        model: any language model.
        read: the tokens from one place up to another, `(r, n)` int64 on any device.
        start: the first token.
        stop: the end; nothing is consumed where it equals `start`.
        state: of `r` rows, before token `start`.
        progress: counts the tokens.
        keep: 1 for the logits after the last token, 0 for none.
        items: whether tokens are also the progress bar's items.

    Returns:
        Logits after the last token, `(r, v)`, or `(r, 0)` where there are none; and the state.

    Raises:
        UserError: logits that are not finite, with the token and the layer where that begins.
    """
    logits, before = torch.empty(len(state.position), 0), state
    for place in range(start, stop, PREFILL):
        end = min(stop, place + PREFILL)
        tokens = read(place, end).to(state.position.device)
        kept, state = model(tokens, state, keep=keep if end == stop else 0)
        progress.advance(tokens.numel() if items else 0, tokens.numel())
        if keep and end == stop:
            logits = kept[:, -1]
    if not keep and stop > start:
        refuse_nonfinite_state(model, lambda: read(start, stop), before, state)
    if not bool(logits.isfinite().all()):
        explain_nonfinite(model, read(start, stop), before)
    return logits, state
