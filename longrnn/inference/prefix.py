"""Greedy answers to many prompts of which long parts are equal, none of them read twice.

A state is a value: the text that prompts begin with is read once, and its state is forked where a
prompt goes its own way; a prompt that is a longer version of another goes on from where that one
asked its question, on a fork of its own. What is read and in which pieces differs from reading each
prompt by itself; what a state then holds is equal to rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from longrnn.inference.pieces import prefill
from longrnn.models import LanguageModel, generate
from longrnn.progress import Progress
from longrnn.state import LMState, join, take
from longrnn.tasks.repeated import RepeatedTokens, length, read


class Prompt(NamedTuple):
    """One prompt.

    Attributes:
        context: what comes before the question.
        question: `(q,)`, q >= 1.
        trunk: prompts of one trunk have equal contexts up to the smaller of their `fork`.
        fork: how many tokens of the context are of the trunk.
        branch: prompts of one trunk, fork and branch have contexts of which the shorter is the
            beginning of the longer.
    """

    context: list[RepeatedTokens]
    question: Tensor
    trunk: Hashable
    fork: int
    branch: Hashable


class Stop(NamedTuple):
    """After so many tokens of a branch, the question of prompt `number` is asked."""

    place: int
    number: int


class Branch(NamedTuple):
    """What follows a fork: the longest context, and the stops on it, nearest first."""

    context: list[RepeatedTokens]
    fork: int
    stops: list[Stop]

    def read(self, start: int, stop: int) -> Tensor:
        """Tokens after the fork."""
        return read(self.context, self.fork + start, self.fork + stop)


class Answer(NamedTuple):
    """The ids that a model says to prompt `number`."""

    number: int
    ids: list[int]


class Cost(NamedTuple):
    """Tokens that a model reads to answer prompts, answers included.

    Attributes:
        shared: as `answers` reads them.
        naive: every prompt by itself.
    """

    shared: int
    naive: int

    @property
    def ratio(self) -> float:
        """How many times fewer tokens are read."""
        return self.naive / max(self.shared, 1)


def count_tokens(prompts: Sequence[Prompt], *, max_new_tokens: int) -> Cost:
    """What `answers` costs, without a model: every token is counted, none is read."""
    trunks: dict[Hashable, int] = {}
    for prompt in prompts:
        trunks[prompt.trunk] = max(trunks.get(prompt.trunk, 0), prompt.fork)
    branches = sum(branch.stops[-1].place for branch in _branches(prompts).values())
    asked = sum(len(prompt.question) + max_new_tokens for prompt in prompts)
    contexts = sum(length(prompt.context) for prompt in prompts)
    return Cost(sum(trunks.values()) + branches + asked, contexts + asked)


@torch.no_grad()
def answers(
    model: LanguageModel,
    prompts: Sequence[Prompt],
    *,
    max_new_tokens: int,
    batch_size: int,
    progress: Progress,
) -> Iterator[list[Answer]]:
    """Answers in the order in which they are found, a batch of them at a time."""
    branches = _branches(prompts)
    for trunk in dict.fromkeys(prompt.trunk for prompt in prompts):
        of_trunk = {key: branch for key, branch in branches.items() if key[0] == trunk}
        forks = _trunk_states(model, list(of_trunk.values()), progress)
        # Branches of one length run out together.
        ordered = sorted(of_trunk.values(), key=lambda branch: branch.stops[-1].place)
        for first in range(0, len(ordered), batch_size):
            rows = ordered[first : first + batch_size]
            state = join([forks[row.fork] for row in rows])
            yield from _walk(model, rows, state, prompts, max_new_tokens, progress)


def _branches(prompts: Sequence[Prompt]) -> dict[tuple[Hashable, ...], Branch]:
    """The branches by trunk, fork and name."""
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
    """The state of one row at every fork of a trunk."""
    longest = max(branches, key=lambda branch: branch.fork)
    state, place, states = model.init_state(1), 0, {}
    for fork in sorted({branch.fork for branch in branches}):
        _, state = prefill(
            model, _reader([(longest.context, 0)]), place, fork, state, progress, keep=0
        )
        states[fork], place = state, fork
    return states


def _walk(
    model: LanguageModel,
    rows: list[Branch],
    state: LMState,
    prompts: Sequence[Prompt],
    max_new_tokens: int,
    progress: Progress,
) -> Iterator[list[Answer]]:
    """Reads branches side by side and asks at their stops; rows that are through drop out."""
    left = [list(row.stops) for row in rows]
    place = 0
    while rows:
        goal = min(stops[0].place for stops in left)
        texts = [(row.context, row.fork) for row in rows]
        _, state = prefill(model, _reader(texts), place, goal, state, progress, keep=0)
        place = goal
        here = [
            (row, stops.pop(0).number) for row, stops in enumerate(left) if stops[0].place == goal
        ]
        yield from _ask(model, here, state, prompts, max_new_tokens, progress)
        # A row may stop twice at one place, to be asked two questions.
        going = [row for row, stops in enumerate(left) if stops]
        if len(going) < len(rows):
            rows, left = [rows[row] for row in going], [left[row] for row in going]
            state = take(state, going)


def _reader(texts: Sequence[tuple[list[RepeatedTokens], int]]) -> Callable[[int, int], Tensor]:
    """Reads tokens of rows of spans, each after its own offset."""
    return lambda start, stop: torch.stack(
        [read(spans, offset + start, offset + stop) for spans, offset in texts]
    )


def _ask(
    model: LanguageModel,
    here: Sequence[tuple[int, int]],
    state: LMState,
    prompts: Sequence[Prompt],
    max_new_tokens: int,
    progress: Progress,
) -> Iterator[list[Answer]]:
    """Asks the rows `(row, prompt)`, those with questions of one length together."""
    sizes = dict.fromkeys(len(prompts[index].question) for _, index in here)
    for size in sizes:
        same = [(row, index) for row, index in here if len(prompts[index].question) == size]
        questions = torch.stack([prompts[index].question for _, index in same])
        forked = take(state, [row for row, _ in same])
        said = generate(
            model,
            questions.to(state.position.device),
            forked,
            max_new_tokens=max_new_tokens,
        )
        progress.advance(0, questions.numel())
        yield [Answer(index, ids) for (_, index), ids in zip(same, said.tokens, strict=True)]
