"""Reads many texts in batches; beginnings that they share are read once, and the state is forked.

Texts of different lengths need no padding, which would enter the state: all rows of a batch are
read up to the next stop of one of them, and a row leaves the batch after its last stop.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from itertools import groupby
from typing import NamedTuple

import torch
from torch import Tensor

from longrnn.data.prompts import RepeatedTokens, length, read
from longrnn.models import LanguageModel
from longrnn.models.base import MAX_LOGITS
from longrnn.models.finite import explain_nonfinite
from longrnn.progress import Progress
from longrnn.state import LMState, join, leaves, take

Ids = tuple[int, ...]

# Tokens per row in one call that returns at most the logits after its last token.
PREFILL_TOKENS = 16384
# Tokens per row in one call that returns all logits.
SCORED_TOKENS = 4096
# A fork must save at least this many tokens; otherwise reading the rows in one batch is faster.
MIN_SAVED_TOKENS = 256


class Stop(NamedTuple):
    """The text or prompt `number` ends after `position` tokens of a row."""

    position: int
    number: int


class Row(NamedTuple):
    """What follows a fork.

    Attributes:
        read: returns the tokens from one position up to another, `(t,)`, counted from the fork.
        stops: nearest first.
        state: at the fork, one row.
    """

    read: Callable[[int, int], Tensor]
    stops: list[Stop]
    state: LMState


class Texts(NamedTuple):
    """Texts of which all tokens have been read.

    Attributes:
        numbers: their numbers, one per row.
        logits: `(b, v)` after their last tokens; `(b, 0)` if none was read after the fork.
        state: after their last tokens.
    """

    numbers: list[int]
    logits: Tensor
    state: LMState


class Prompt(NamedTuple):
    """One prompt.

    Attributes:
        context: the text before the question.
        question: `(t,)` token ids, t >= 1.
        trunk: prompts of the same trunk have equal contexts up to the smaller of their `fork`.
        fork: how many tokens of the context belong to the trunk.
        branch: of two prompts with the same trunk, fork and branch, the shorter context is a prefix
            of the longer.
    """

    context: list[RepeatedTokens]
    question: Tensor
    trunk: Hashable
    fork: int
    branch: Hashable


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
    """Consumes the tokens from `start` up to `stop` of every row, in calls of bounded memory.

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
    results = [logits] if keep else [leaf for _, leaf in leaves(state.layers)]
    if stop > start and not all(bool(one.isfinite().all()) for one in results):
        explain_nonfinite(model, read(start, stop), before)
    return logits, state


def read_rows(
    model: LanguageModel, rows: Sequence[Row], batch_size: int, progress: Progress, *, keep: int = 1
) -> Iterator[Texts]:
    """Reads rows from their forks to their stops, in batches of rows of similar length."""
    rows = sorted(rows, key=lambda row: row.stops[-1].position)
    for first in range(0, len(rows), batch_size):
        active = rows[first : first + batch_size]
        state = join([row.state for row in active])
        stops, position = [list(row.stops) for row in active], 0
        while active:
            goal = min(own[0].position for own in stops)
            readers = [row.read for row in active]
            logits, state = prefill(
                model,
                lambda start, stop, readers=readers: torch.stack([r(start, stop) for r in readers]),
                position,
                goal,
                state,
                progress,
                keep=keep,
            )
            position = goal
            due = [row for row, own in enumerate(stops) if own[0].position == goal]
            numbers = [stops[row].pop(0).number for row in due]
            yield Texts(numbers, logits[due], take(state, due))
            # A row may have two stops at one position, for two questions.
            kept = [row for row, own in enumerate(stops) if own]
            if len(kept) < len(active):
                active, stops = [active[row] for row in kept], [stops[row] for row in kept]
                state = take(state, kept)


def read_texts(
    model: LanguageModel,
    texts: Sequence[Ids],
    batch_size: int,
    progress: Progress,
    *,
    keep: int = 1,
) -> Iterator[Texts]:
    """Reads distinct texts from the initial state.

    Args:
        model: any language model.
        texts: token ids, of any lengths.
        batch_size: rows per batch.
        progress: counts the tokens that are computed.
        keep: 1 for the logits after the last token, 0 for none.
    """
    order = sorted(range(len(texts)), key=texts.__getitem__)
    if order and not texts[order[0]]:
        yield Texts([order.pop(0)], torch.empty(1, 0), model.init_state(1))
    # Texts that are equal up to a fork, and the state (one row) at an earlier token.
    stack = [(order, 0, 0, model.init_state(1))] if order else []
    while stack:
        numbers, start, fork, state = stack.pop()
        shared = texts[numbers[0]]
        _, state = prefill(
            model, lambda a, b, text=shared: _ids(text, 0)(a, b)[None], start, fork, state,
            progress, keep=0,
        )  # fmt: skip
        rows: list[Row] = []
        for group in _groups(texts, numbers, fork):
            further = _fork(texts, group, fork)
            if (further - fork) * (len(group) - 1) >= MIN_SAVED_TOKENS:
                stack.append((group, fork, further, state))
                continue
            for number in group:
                text = texts[number]
                rows.append(Row(_ids(text, fork), [Stop(len(text) - fork, number)], state))
        yield from read_rows(model, rows, batch_size, progress, keep=keep)


def _ids(text: Ids, fork: int) -> Callable[[int, int], Tensor]:
    return lambda start, stop: torch.tensor(text[fork + start : fork + stop], dtype=torch.long)


def _groups(texts: Sequence[Ids], numbers: list[int], fork: int) -> list[list[int]]:
    """Groups texts by their token at `fork`; a text that ends there is a group of its own."""

    def kind(number: int) -> tuple[int, bool]:
        return texts[number][fork], len(texts[number]) > fork + 1

    return [list(group) for _, group in groupby(numbers, kind)]


def _fork(texts: Sequence[Ids], numbers: list[int], start: int) -> int:
    """How many tokens some texts share, leaving at least one token of each.

    Args:
        texts: all texts.
        numbers: indices of the texts to compare, in sorted order.
        start: a number of tokens that they are known to share.
    """
    if len(numbers) == 1:
        return start
    first, last = texts[numbers[0]], texts[numbers[-1]]
    shortest = min(len(texts[number]) for number in numbers) - 1
    return next((i for i in range(start, shortest) if first[i] != last[i]), shortest)


def read_contexts(
    model: LanguageModel, prompts: Sequence[Prompt], batch_size: int, progress: Progress
) -> Iterator[Texts]:
    """Reads the contexts of prompts from the initial state; `Prompt` says what they share."""
    found = branches(prompts)
    for trunk in dict.fromkeys(prompt.trunk for prompt in prompts):
        own = {key: stops for key, stops in found.items() if key[0] == trunk}
        longest = prompts[max(own.items(), key=lambda item: item[0][1])[1][-1].number].context
        state, position, forks = model.init_state(1), 0, dict[int, LMState]()
        for fork in sorted({key[1] for key in own}):
            _, state = prefill(
                model, lambda a, b, text=longest: read(text, a, b)[None], position, fork, state,
                progress, keep=0,
            )  # fmt: skip
            forks[fork], position = state, fork
        rows = [
            Row(_context(prompts[stops[-1].number].context, fork), stops, forks[fork])
            for (_, fork, _), stops in own.items()
        ]
        yield from read_rows(model, rows, batch_size, progress, keep=0)


def _context(context: list[RepeatedTokens], fork: int) -> Callable[[int, int], Tensor]:
    return lambda start, stop: read(context, fork + start, fork + stop)


def branches(prompts: Sequence[Prompt]) -> dict[tuple[Hashable, int, Hashable], list[Stop]]:
    """Where the contexts of each (trunk, fork, branch) end, counted from the fork."""
    found: dict[tuple[Hashable, int, Hashable], list[Stop]] = {}
    for number, prompt in enumerate(prompts):
        stop = Stop(length(prompt.context) - prompt.fork, number)
        found.setdefault((prompt.trunk, prompt.fork, prompt.branch), []).append(stop)
    return {key: sorted(stops) for key, stops in found.items()}
