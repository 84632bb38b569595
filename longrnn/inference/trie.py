"""Reads many texts in batches, and the beginnings that they share only once.

A shared beginning is read once, and its state is forked where the texts differ. Texts of different
lengths need no padding, which would enter the state: all rows of a batch are read up to the end of
the shortest, which then leaves the batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from typing import NamedTuple

import torch
from torch import Tensor

from longrnn.inference.prefill import prefill
from longrnn.models import LanguageModel
from longrnn.progress import Progress
from longrnn.state import LMState, expand, take

Ids = tuple[int, ...]

# A fork must save at least this many tokens; otherwise reading the rows in one batch is faster.
MIN_SAVED_TOKENS = 256


class ReadTexts(NamedTuple):
    """Texts of equal length that have been read completely.

    Attributes:
        numbers: their indices, one per row.
        logits: `(b, v)` after their last tokens; `(1, 0)` for the empty text.
        state: after their last tokens.
    """

    numbers: list[int]
    logits: Tensor
    state: LMState


class Branch(NamedTuple):
    """Texts that are equal up to token `fork`, and the state (one row) at token `start`."""

    numbers: list[int]
    start: int
    fork: int
    state: LMState


@torch.no_grad()
def read_texts(
    model: LanguageModel, texts: Sequence[Ids], batch_size: int, progress: Progress
) -> Iterator[ReadTexts]:
    """Reads distinct texts from the initial state; shared beginnings are read once.

    Args:
        model: any language model.
        texts: token ids, of any lengths.
        batch_size: rows per batch.
        progress: counts the tokens that are computed.
    """
    order = sorted(range(len(texts)), key=texts.__getitem__)
    if order and not texts[order[0]]:
        yield ReadTexts([order.pop(0)], torch.empty(1, 0), model.init_state(1))
    stack = [Branch(order, 0, 0, model.init_state(1))] if order else []
    while stack:
        branch = stack.pop()
        first = texts[branch.numbers[0]]
        _, state = prefill(
            model, _reader([first]), branch.start, branch.fork, branch.state, progress, keep=0
        )
        leaves: list[int] = []
        for group in _groups(texts, branch.numbers, branch.fork):
            fork = _fork(texts, group, branch.fork)
            if (fork - branch.fork) * (len(group) - 1) < MIN_SAVED_TOKENS:
                leaves += group
            else:
                stack.append(Branch(group, branch.fork, fork, state))
        leaves.sort(key=lambda number: len(texts[number]))
        for start in range(0, len(leaves), batch_size):
            rows = leaves[start : start + batch_size]
            yield from _walk(model, texts, rows, branch.fork, state, progress)


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


def _walk(
    model: LanguageModel,
    texts: Sequence[Ids],
    numbers: list[int],
    start: int,
    state: LMState,
    progress: Progress,
) -> Iterator[ReadTexts]:
    """Reads texts, sorted by length, in one batch from their common state at token `start`."""
    state = expand(state, len(numbers))
    while numbers:
        goal = len(texts[numbers[0]])
        rows = [texts[number] for number in numbers]
        logits, state = prefill(model, _reader(rows), start, goal, state, progress)
        done = sum(len(row) == goal for row in rows)
        yield ReadTexts(numbers[:done], logits[:done], take(state, range(done)))
        state = take(state, range(done, len(numbers)))
        numbers, start = numbers[done:], goal


def _reader(rows: Sequence[Ids]) -> Callable[[int, int], Tensor]:
    """A function that returns the tokens from one position up to another, one row per text."""
    return lambda start, stop: torch.tensor([row[start:stop] for row in rows], dtype=torch.long)


def tensor(rows: Sequence[Ids], state: LMState) -> Tensor:
    """Token ids as a tensor `(b, t)` on the device of a state; all rows have one length."""
    return torch.tensor(rows, dtype=torch.long, device=state.position.device)
