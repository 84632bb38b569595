"""Reads one long text with several processes, each of which reads a share of it.

A text is read in pieces, so that memory stays bounded, and every piece is divided over the
processes. All processes call these functions with the same arguments and get the same results,
which are those of one process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from torch.nn import functional as F

from longrnn.inference.prefill import PREFILL_TOKENS, scored_tokens
from longrnn.mitigations import Mitigated
from longrnn.models import LanguageModel, RecurrentLM
from longrnn.models.context import ContextGroup, check_divisible, from_shares, share_of
from longrnn.models.finite import explain_nonfinite, refuse_nonfinite_state
from longrnn.progress import Progress
from longrnn.state import LMState


def divisible(model: LanguageModel) -> RecurrentLM | Mitigated:
    """The model, whose rows can be divided over processes.

    Raises:
        UserError: they cannot.
    """
    check_divisible(model.model if isinstance(model, Mitigated) else model)
    assert isinstance(model, RecurrentLM | Mitigated)
    return model


@torch.no_grad()
def prefill_together(
    model: LanguageModel,
    read: Callable[[int, int], Tensor],
    length: int,
    group: ContextGroup,
    state: LMState | None = None,
    progress: Progress | None = None,
) -> tuple[Tensor, LMState]:
    """Reads the first `length` tokens of every row.

    Args:
        model: a recurrent model of longrnn, also under a mitigation; the same in all processes.
        read: returns the tokens from one position up to another, `(b, t)` int64 on any device.
        length: at least 1.
        group: the processes, for example `ContextGroup.of()` for all.
        state: before the first token; the initial state of `read`'s rows if None.
        progress: counts the tokens of all processes.

    Returns:
        The logits after the last token, `(b, v)`, and the state after it.

    Raises:
        UserError: the rows of the model cannot be divided, or its results are not finite.
    """
    shared = divisible(model)
    before: LMState = model.init_state(len(read(0, 1))) if state is None else state
    after, device, logits = before, before.position.device, torch.empty(0)
    for start in range(0, length, PREFILL_TOKENS * group.size):
        stop = min(length, start + PREFILL_TOKENS * group.size)
        own = share_of(stop - start, group)
        tokens = read(start + own.start, start + own.stop).to(device)
        # The last process reads the last token: its share is never the shorter one.
        kept, after = shared(tokens, after, keep=int(stop == length), context=group)
        if stop == length:
            logits = kept.new_zeros(len(tokens), model.vocab_size)
            logits = group.gather(kept[:, -1] if group.is_last else logits)[-1]
        if progress is not None:
            progress.advance(0, (stop - start) * len(tokens))
    refuse_nonfinite_state(model, lambda: read(0, length), before, after)
    if not bool(logits.isfinite().all()):
        explain_nonfinite(model, read(0, length), before)
    return logits, after


@torch.no_grad()
def token_losses_together(
    model: LanguageModel, windows: Tensor, group: ContextGroup
) -> Iterator[tuple[int, Tensor]]:
    """`longrnn.inference.scoring.token_losses` from the initial state, by several processes.

    Args:
        model: see `prefill_together`.
        windows: `(b, t + 1)` token ids; the last one is only predicted.
        group: the processes.

    Yields:
        The position where a part begins, and its losses in nats, `(b, t)` float64 on the CPU.

    Raises:
        UserError: the rows of the model cannot be divided, or its logits are not finite.
    """
    shared = divisible(model)
    batch, length = len(windows), windows.shape[1] - 1
    before = state = model.init_state(batch)
    width = scored_tokens(batch, model.vocab_size) * group.size
    for start in range(0, length, width):
        stop = min(length, start + width)
        own = share_of(stop - start, group)
        columns = torch.arange(start + own.start, start + own.stop)
        part = windows[:, columns].to(state.position.device)
        logits, state = shared(part, state, context=group)
        wide = logits.to(torch.promote_types(logits.dtype, torch.float32)).flatten(0, 1)
        targets = windows[:, columns + 1].to(wide.device).flatten()
        nats = F.cross_entropy(wide, targets, reduction="none").view(batch, -1).double()
        nats = from_shares(group, nats, (columns - start).to(nats.device), stop - start).cpu()
        if not bool(nats.isfinite().all()):
            explain_nonfinite(model, windows[:, :stop], before)
        yield start, nats
