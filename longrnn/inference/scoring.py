"""Losses per token, and log-likelihoods of continuations; equal contexts are read once.

Continuations of one context are scored on forks of its state. Logits are computed for scored tokens
only, and a long continuation is scored in parts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from longrnn.inference.prefill import SCORED_TOKENS, scored_tokens
from longrnn.inference.trie import Ids, read_texts, tensor
from longrnn.models import LanguageModel
from longrnn.models.finite import explain_nonfinite, refuse_nonfinite
from longrnn.progress import Progress
from longrnn.state import LMState, take


class Pair(NamedTuple):
    """A continuation to score, and the context before it (at least one token)."""

    context: Ids
    continuation: Ids


class Score(NamedTuple):
    """`nats`: log-likelihood of a continuation; `greedy`: whether greedy decoding generates it."""

    nats: float
    greedy: bool


@torch.no_grad()
def token_losses(
    model: LanguageModel, windows: Tensor, state: LMState | None = None
) -> Iterator[tuple[int, Tensor]]:
    """Computes the loss of every token after the first, in parts.

    Args:
        model: reads the windows.
        windows: `(b, t + 1)` token ids; the last one is only predicted.
        state: before the windows; the initial state if None.

    Yields:
        The position where a part begins, and its losses in nats, `(b, t)` float64 on the CPU: the
        loss at position i is that of token i + 1.

    Raises:
        UserError: logits that are not finite.
    """
    batch, length = len(windows), windows.shape[1] - 1
    before = state = model.init_state(batch) if state is None else state
    for start in range(0, length, SCORED_TOKENS):
        part = windows[:, start : start + SCORED_TOKENS + 1].to(state.position.device)
        nats, state = model.token_losses(part[:, :-1], part[:, 1:], state)
        nats = nats.double().cpu()
        if not bool(nats.isfinite().all()):
            explain_nonfinite(model, windows[:, : start + part.shape[1] - 1], before)
        yield start, nats


@torch.no_grad()
def score(
    model: LanguageModel, pairs: Sequence[Pair], *, batch_size: int, progress: Progress
) -> Iterator[tuple[int, Score]]:
    """Scores continuations.

    Args:
        model: any language model.
        pairs: contexts and continuations; equal contexts are read once.
        batch_size: rows per batch.
        progress: counts the pairs and the tokens that are computed.

    Yields:
        The index of a pair and its score, in the order in which they are computed.
    """
    pairs_of: dict[Ids, list[int]] = {}
    for index, pair in enumerate(pairs):
        pairs_of.setdefault(pair.context, []).append(index)
    contexts = list(pairs_of)
    for numbers, logits, state in read_texts(model, contexts, batch_size, progress):
        forks = [(row, i) for row, n in enumerate(numbers) for i in pairs_of[contexts[n]]]
        forks.sort(key=lambda fork: len(pairs[fork[1]].continuation))
        for first in range(0, len(forks), batch_size):
            rows, indices = zip(*forks[first : first + batch_size], strict=True)
            continuations = [pairs[index].continuation for index in indices]
            scores = _score_batch(
                model, continuations, logits[list(rows)], take(state, rows), progress
            )
            progress.advance(len(indices), 0)
            yield from zip(indices, scores, strict=True)


def _score_batch(
    model: LanguageModel,
    continuations: Sequence[Ids],
    logits: Tensor,
    state: LMState,
    progress: Progress,
) -> list[Score]:
    """Scores one batch of continuations, shortest first.

    Args:
        model: any language model.
        continuations: one per row.
        logits: `(b, v)`, the prediction of their first tokens.
        state: after the contexts.
        progress: counts the tokens that are computed.
    """
    nats = torch.zeros(len(continuations), dtype=torch.float64)
    greedy = torch.ones(len(continuations), dtype=torch.bool)
    predicted, position, done = logits[:, None], 0, 0
    # `prefill` has checked the logits of the contexts.
    part, before = tensor([()] * len(continuations), state), state
    while True:
        width = predicted.shape[1]
        target = tensor([row[position : position + width] for row in continuations[done:]], state)
        loss, best = _compare(predicted, target)
        refuse_nonfinite(loss, model, part, before)
        nats[done:] -= loss
        greedy[done:] &= best
        position += width
        ended = sum(len(row) == position for row in continuations[done:])
        done += ended
        if done == len(continuations):
            scores = zip(nats.tolist(), greedy.tolist(), strict=True)
            return [Score(*score) for score in scores]
        if ended:
            state = take(state, range(ended, len(state.position)))
        rows = continuations[done:]
        width = min(scored_tokens(len(rows), model.vocab_size), len(rows[0]) - position)
        part = tensor([row[position - 1 : position - 1 + width] for row in rows], state)
        before = state
        predicted, state = model(part, before)
        progress.advance(0, part.numel())


def _compare(logits: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Loss of each row in nats, `(b,)`, and whether all its targets are most likely, `(b,)`."""
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    loss = F.cross_entropy(wide.flatten(0, 1), target.flatten(), reduction="none")
    best = (wide.argmax(-1) == target).all(1)
    return loss.view(target.shape).double().sum(1).cpu(), best.cpu()
