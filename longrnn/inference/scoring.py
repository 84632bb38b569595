"""Losses by token, and log-likelihoods of continuations whose equal contexts are read once.

Continuations of one context are scored on forks of its state. Logits exist for scored tokens only,
and of a long continuation for one piece at a time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from longrnn.inference.pieces import scored_tokens
from longrnn.inference.trie import Ids, read_texts, tensor
from longrnn.models import LanguageModel
from longrnn.models.finite import explain_nonfinite, refuse_nonfinite
from longrnn.progress import Progress
from longrnn.state import LMState, take


class Pair(NamedTuple):
    """A continuation to score, and what comes before it (at least one token)."""

    context: Ids
    continuation: Ids


class Score(NamedTuple):
    """`nats`: log-likelihood of a continuation; `greedy`: whether the model would say it."""

    nats: float
    greedy: bool


@torch.no_grad()
def token_losses(model: LanguageModel, windows: Tensor) -> Iterator[tuple[int, Tensor]]:
    """The loss of every token after the first, piece by piece.

    Args:
        model: reads the windows from an empty state.
        windows: `(b, n + 1)`, the tokens and the one to predict last.

    Yields:
        The position of a piece, and `(b, k)` nats from there on, float64 on the CPU: the loss at
        position i is that of token i + 1.

    Raises:
        UserError: logits that are not finite.
    """
    batch, length = len(windows), windows.shape[1] - 1
    state = model.init_state(batch)
    width = scored_tokens(batch, model.vocab_size)
    for start in range(0, length, width):
        piece = windows[:, start : start + width + 1].to(state.position.device)
        logits, state = model(piece[:, :-1], state)
        wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
        nats = F.cross_entropy(wide.flatten(0, 1), piece[:, 1:].flatten(), reduction="none")
        nats = nats.view(batch, -1).double().cpu()
        if not bool(nats.isfinite().all()):
            explain_nonfinite(model, windows[:, : start + piece.shape[1] - 1])
        yield start, nats


@torch.no_grad()
def score(
    model: LanguageModel, pairs: Sequence[Pair], *, batch_size: int, progress: Progress
) -> Iterator[tuple[int, Score]]:
    """Scores pairs, in the order in which they are found.

    Args:
        model: any.
        pairs: those with one context share its reading.
        batch_size: rows that are read side by side.
        progress: counts the pairs, and the tokens that are computed.

    Yields:
        The number of a pair and its score.
    """
    asked: dict[Ids, list[int]] = {}
    for index, pair in enumerate(pairs):
        asked.setdefault(pair.context, []).append(index)
    contexts = list(asked)
    for numbers, logits, state in read_texts(model, contexts, batch_size, progress):
        forks = [(row, i) for row, number in enumerate(numbers) for i in asked[contexts[number]]]
        forks.sort(key=lambda fork: len(pairs[fork[1]].continuation))
        for first in range(0, len(forks), batch_size):
            rows, indices = zip(*forks[first : first + batch_size], strict=True)
            wanted = [pairs[index].continuation for index in indices]
            scores = _follow(model, wanted, logits[list(rows)], take(state, rows), progress)
            progress.advance(len(indices), 0)
            yield from zip(indices, scores, strict=True)


def _follow(
    model: LanguageModel,
    wanted: Sequence[Ids],
    logits: Tensor,
    state: LMState,
    progress: Progress,
) -> list[Score]:
    """Scores continuations, shortest first, one a row.

    Args:
        model: any.
        wanted: the continuations, `r` of them.
        logits: `(r, v)`, which predict their first tokens.
        state: of `r` rows, after the contexts.
        progress: counts the tokens that are computed.
    """
    nats = torch.zeros(len(wanted), dtype=torch.float64)
    greedy = torch.ones(len(wanted), dtype=torch.bool)
    predicted, place, done = logits[:, None], 0, 0
    # The logits of a context were looked at when it was read.
    piece, before = tensor([()] * len(wanted), state), state
    while True:
        width = predicted.shape[1]
        target = tensor([row[place : place + width] for row in wanted[done:]], state)
        loss, best = _compare(predicted, target)
        refuse_nonfinite(loss, model, piece, before)
        nats[done:] -= loss
        greedy[done:] &= best
        place += width
        ended = sum(len(row) == place for row in wanted[done:])
        done += ended
        if done == len(wanted):
            scores = zip(nats.tolist(), greedy.tolist(), strict=True)
            return [Score(*score) for score in scores]
        if ended:
            state = take(state, range(ended, len(state.position)))
        rows = wanted[done:]
        width = min(scored_tokens(len(rows), model.vocab_size), len(rows[0]) - place)
        piece = tensor([row[place - 1 : place - 1 + width] for row in rows], state)
        before = state
        predicted, state = model(piece, before)
        progress.advance(0, piece.numel())


def _compare(logits: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Sum of the loss in nats `(r,)` float64, and whether each target is likeliest `(r,)`."""
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    loss = F.cross_entropy(wide.flatten(0, 1), target.flatten(), reduction="none")
    best = (wide.argmax(-1) == target).all(1)
    return loss.view(target.shape).double().sum(1).cpu(), best.cpu()
