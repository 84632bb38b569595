"""Greedy answers to many prompts with long common parts, each of which is read only once.

The beginning that prompts share is read once, and its state is forked where they differ. A prompt
whose context extends that of another one continues from the fork at which the other asked its
question. The calls of the model differ from those for each prompt alone; the states are equal up to
rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from longrnn.data.prompts import RepeatedTokens, length, read
from longrnn.inference.prefill import prefill
from longrnn.models import LanguageModel, generate
from longrnn.progress import Progress
from longrnn.state import LMState, join, take


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


class Stop(NamedTuple):
    """The question of prompt `number` is asked after `position` tokens of a branch."""

    position: int
    number: int


class Branch(NamedTuple):
    """The text after a fork: the longest context, and the stops in it, nearest first."""

    context: list[RepeatedTokens]
    fork: int
    stops: list[Stop]

    def read(self, start: int, stop: int) -> Tensor:
        """The tokens from `start` up to `stop`, counted from the fork."""
        return read(self.context, self.fork + start, self.fork + stop)


class Answer(NamedTuple):
    """The ids that a model generates after prompt `number`."""

    number: int
    ids: list[int]


class Cost(NamedTuple):
    """Number of tokens that a model processes to answer prompts, including the answers.

    Attributes:
        shared: with `answers`.
        naive: with each prompt read separately.
    """

    shared: int
    naive: int

    @property
    def ratio(self) -> float:
        """How many times fewer tokens are processed."""
        return self.naive / max(self.shared, 1)


def count_tokens(prompts: Sequence[Prompt], *, max_new_tokens: int) -> Cost:
    """Counts the tokens that `answers` would process, without a model."""
    trunks: dict[Hashable, int] = {}
    for prompt in prompts:
        trunks[prompt.trunk] = max(trunks.get(prompt.trunk, 0), prompt.fork)
    branches = sum(branch.stops[-1].position for branch in _branches(prompts).values())
    questions = sum(len(prompt.question) + max_new_tokens for prompt in prompts)
    contexts = sum(length(prompt.context) for prompt in prompts)
    return Cost(sum(trunks.values()) + branches + questions, contexts + questions)


@torch.no_grad()
def answers(
    model: LanguageModel,
    prompts: Sequence[Prompt],
    *,
    max_new_tokens: int,
    batch_size: int,
    progress: Progress,
) -> Iterator[list[Answer]]:
    """Yields batches of greedy answers, in the order in which they are computed."""
    branches = _branches(prompts)
    for trunk in dict.fromkeys(prompt.trunk for prompt in prompts):
        trunk_branches = {key: branch for key, branch in branches.items() if key[0] == trunk}
        forks = _trunk_states(model, list(trunk_branches.values()), progress)
        # Sorted by length, because branches of equal length end together.
        ordered = sorted(trunk_branches.values(), key=lambda branch: branch.stops[-1].position)
        for first in range(0, len(ordered), batch_size):
            rows = ordered[first : first + batch_size]
            state = join([forks[row.fork] for row in rows])
            yield from _walk(model, rows, state, prompts, max_new_tokens, progress)


def _branches(prompts: Sequence[Prompt]) -> dict[tuple[Hashable, ...], Branch]:
    """The branches by (trunk, fork, branch)."""
    members: dict[tuple[Hashable, ...], list[Stop]] = {}
    for index, prompt in enumerate(prompts):
        key = prompt.trunk, prompt.fork, prompt.branch
        stop = Stop(length(prompt.context) - prompt.fork, index)
        members.setdefault(key, []).append(stop)
    found = {}
    for key, stops in members.items():
        stops.sort()
        longest = prompts[stops[-1].number]
        found[key] = Branch(longest.context, longest.fork, stops)
    return found


def _trunk_states(
    model: LanguageModel, branches: Sequence[Branch], progress: Progress
) -> dict[int, LMState]:
    """The state of a trunk, one row, at each of its forks."""
    longest = max(branches, key=lambda branch: branch.fork)
    state, position, states = model.init_state(1), 0, {}
    for fork in sorted({branch.fork for branch in branches}):
        _, state = prefill(
            model, _reader([(longest.context, 0)]), position, fork, state, progress, keep=0
        )
        states[fork], position = state, fork
    return states


def _walk(
    model: LanguageModel,
    rows: list[Branch],
    state: LMState,
    prompts: Sequence[Prompt],
    max_new_tokens: int,
    progress: Progress,
) -> Iterator[list[Answer]]:
    """Reads branches in one batch and asks at their stops; rows leave it after their last stop."""
    remaining = [list(row.stops) for row in rows]
    position = 0
    while rows:
        goal = min(stops[0].position for stops in remaining)
        texts = [(row.context, row.fork) for row in rows]
        _, state = prefill(model, _reader(texts), position, goal, state, progress, keep=0)
        position = goal
        due = [
            (row, stops.pop(0).number)
            for row, stops in enumerate(remaining)
            if stops[0].position == goal
        ]
        yield from _ask(model, due, state, prompts, max_new_tokens, progress)
        # A row may have two stops at one position, for two questions.
        active = [row for row, stops in enumerate(remaining) if stops]
        if len(active) < len(rows):
            rows, remaining = [rows[row] for row in active], [remaining[row] for row in active]
            state = take(state, active)


def _reader(texts: Sequence[tuple[list[RepeatedTokens], int]]) -> Callable[[int, int], Tensor]:
    """A function that returns tokens of several texts, each counted from its own offset."""
    return lambda start, stop: torch.stack(
        [read(text, offset + start, offset + stop) for text, offset in texts]
    )


def _ask(
    model: LanguageModel,
    due: Sequence[tuple[int, int]],
    state: LMState,
    prompts: Sequence[Prompt],
    max_new_tokens: int,
    progress: Progress,
) -> Iterator[list[Answer]]:
    """Answers questions `(row, prompt)`; those of equal length in one batch."""
    sizes = dict.fromkeys(len(prompts[index].question) for _, index in due)
    for size in sizes:
        same = [(row, index) for row, index in due if len(prompts[index].question) == size]
        questions = torch.stack([prompts[index].question for _, index in same])
        forked = take(state, [row for row, _ in same])
        generated = generate(
            model,
            questions.to(state.position.device),
            forked,
            max_new_tokens=max_new_tokens,
        )
        progress.advance(0, questions.numel())
        yield [Answer(index, ids) for (_, index), ids in zip(same, generated.tokens, strict=True)]
