"""Texts read side by side, what they begin with in common once.

A state is a value: what texts share is read once, and its state is forked where they go their own
ways. Texts of different lengths need no padding, which would enter a state: all rows go to the end
of the shortest, which drops out, and the others go on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from typing import NamedTuple

import torch
from torch import Tensor

from longrnn.inference.pieces import prefill
from longrnn.models import LanguageModel
from longrnn.progress import Progress
from longrnn.state import LMState, expand, take

Ids = tuple[int, ...]

# Tokens that a fork must save; below it, rows are better read side by side.
WORTH = 256


class ReadTexts(NamedTuple):
    """Texts that were read to their ends together.

    Attributes:
        numbers: which ones, `r` of them.
        logits: `(r, v)` after their last tokens; `(1, 0)` for the empty text.
        state: of `r` rows.
    """

    numbers: list[int]
    logits: Tensor
    state: LMState


class Branch(NamedTuple):
    """Texts that are equal up to `fork`, and the state (of one row) at their parent's fork."""

    numbers: list[int]
    start: int
    fork: int
    state: LMState


@torch.no_grad()
def read_texts(
    model: LanguageModel, texts: Sequence[Ids], batch_size: int, progress: Progress
) -> Iterator[ReadTexts]:
    """Reads different texts from the empty state, what they begin with in common once.

    Args:
        model: any.
        texts: of any lengths.
        batch_size: rows that are read side by side.
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
            if (fork - branch.fork) * (len(group) - 1) < WORTH:
                leaves += group
            else:
                stack.append(Branch(group, branch.fork, fork, state))
        leaves.sort(key=lambda number: len(texts[number]))
        for start in range(0, len(leaves), batch_size):
            rows = leaves[start : start + batch_size]
            yield from _walk(model, texts, rows, branch.fork, state, progress)


def _groups(texts: Sequence[Ids], numbers: list[int], fork: int) -> list[list[int]]:
    """Texts that also share the token at `fork`; one that ends behind it stands alone."""

    def kind(number: int) -> tuple[int, bool]:
        return texts[number][fork], len(texts[number]) > fork + 1

    return [list(group) for _, group in groupby(numbers, kind)]


def _fork(texts: Sequence[Ids], numbers: list[int], start: int) -> int:
    """How many tokens sorted texts have in common, at least one of each being left.

    Args:
        texts: all texts.
        numbers: which ones are meant.
        start: tokens that they are known to have in common.
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
    """Reads texts, sorted by length, side by side from token `start` of one common state."""
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
    """Reads tokens of rows that are long enough."""
    return lambda start, stop: torch.tensor([row[start:stop] for row in rows], dtype=torch.long)


def tensor(rows: Sequence[Ids], state: LMState) -> Tensor:
    """Rows of one length, `(r, n)`, where a state is."""
    return torch.tensor(rows, dtype=torch.long, device=state.position.device)
