"""Tasks of random sequences: their drawings, programs that solve them, guesses, held-out rows."""

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch

from longrnn.data import TASKS, UNSCORED, Batch, SequenceTask
from tests.data.drawings import drawing

KINDS = sorted(kind for kind, task in TASKS.items() if issubclass(task, SequenceTask))
# What `draw` gives for the drawing in each docstring, at V = 10.
DRAWN = {
    "copy": [7, 1, 4],
    "delayed_sum": [7, 1, 4, 2, 5, 8],
    "modular_sum": [7, 1, 4, 2, 5],
    "mqar": [[2, 8, 4, 7, 4, 0, 5, 9, 2, 6], [0, 0, 0, 0, 1, 0, 0, 0, 1, 0]],
    "parity": [1, 0, 1, 1, 0],
    "permutations": [1, 2, 4, 4, 1],
    "phonebook": [2, 4, 7, 8, 5, 6, 1, 4, 9, 6, 6, 8, 1, 4],
    "predecessor_query": [7, 1, 4, 8, 4],
    "recall": [2, 9, 0, 7, 1, 9, 1, 2, 0],
    "reverse": [7, 1, 4],
    "reverse_variable": [7, 1, 4, -1],
    "sort": [7, 1, 4, 1],
}
# Lengths at which tasks are solved; 8 for the others.
LENGTHS = {"mqar": 16, "parity": 24, "phonebook": 24}
# Tasks with another vocabulary than the 10 tokens of the drawings.
SIZES = {"parity": 2, "permutations": 6}
OPTIONS: dict[str, dict[str, Any]] = {"mqar": {"n_pairs": 2}}


def build(kind: str, **options: Any) -> SequenceTask:
    task = TASKS.build({"kind": kind, **options}, None)
    assert isinstance(task, SequenceTask)
    return task


def shown(task: SequenceTask, batch: Batch) -> dict[str, list[str]]:
    """The first row as a docstring draws it."""
    tokens = ["?" if i == 10 and task.has_query else str(i) for i in batch.tokens[0].tolist()]
    targets = ["." if i == UNSCORED else str(i) for i in batch.targets[0].tolist()]
    return {"tokens": tokens, "targets": targets}


def test_every_task_is_drawn() -> None:
    assert {*DRAWN, "reverse_dual_frequency"} == set(KINDS) == SOLVERS.keys()


@pytest.mark.parametrize("kind", sorted(DRAWN))
def test_the_drawing_in_the_docstring(kind: str) -> None:
    task = build(kind, vocab_size=SIZES.get(kind, 10), held_out=4, **OPTIONS.get(kind, {}))
    assert drawing(TASKS[kind]) == shown(task, task._batch(torch.tensor([DRAWN[kind]])))


def test_the_drawing_of_a_test_sequence() -> None:
    """The scored place is the mirrored place of the target."""
    task = build("reverse_dual_frequency", vocab_size=10, held_out=12)
    rows, _ = task._evaluation_set(3)
    assert task.condition(6) == "rare target, frequent disturbants"
    rows[6] = torch.tensor([2, 9, 4])
    batch = task.evaluation_batch(6, 7, length=3)
    answer = ["x" if place else "." for place in batch.answers()[0].tolist()]
    assert drawing(TASKS["reverse_dual_frequency"]) == {**shown(task, batch), "answer": answer}


def reverse(tokens: list[int]) -> list[int]:
    x = [token for token in tokens if token != 32]
    return [0] * len(x) + x[::-1] + [0] * (len(tokens) - 2 * len(x))


def copy(tokens: list[int]) -> list[int]:
    x = tokens[: len(tokens) // 2]
    return x + x


def sort(tokens: list[int]) -> list[int]:
    x = tokens[: len(tokens) // 2]
    return x + sorted(x)


def delayed_sum(tokens: list[int]) -> list[int]:
    seen: list[int] = []
    said = []
    for place, token in enumerate(tokens):
        if place < len(tokens) // 2:
            seen.append(token)
            said.append(0)
        else:
            said.append((seen.pop() + token) % 32)
    return said


def predecessor(tokens: list[int]) -> list[int]:
    return [0] * (len(tokens) - 1) + [tokens[tokens.index(tokens[-1]) - 1]]


def recall(tokens: list[int]) -> list[int]:
    known: dict[int, int] = {}
    said = []
    for place, token in enumerate(tokens):
        if place < len(tokens) // 3 * 2 and place % 2:
            known[tokens[place - 1]] = token
        said.append(known.get(token, 0))
    return said


def mqar(tokens: list[int]) -> list[int]:
    """Four pairs, and their values wherever a key comes again."""
    known = dict(zip(tokens[:8:2], tokens[1:8:2], strict=True))
    return [known.get(token, 0) for token in tokens]


def phonebook(tokens: list[int]) -> list[int]:
    text = " ".join(map(str, tokens[:-4]))
    book, asked = text.rsplit(" ", 2)[0], " ".join(text.rsplit(" ", 2)[1:])
    lines = [book.split()[start : start + 6] for start in range(0, len(book.split()), 6)]
    (number,) = [line[2:] for line in lines if " ".join(line[:2]) == asked]
    return [0] * (len(tokens) - 4) + [int(digit) for digit in number]


def modular_sum(tokens: list[int], modulus: int = 32) -> list[int]:
    return [sum(tokens[: place + 1]) % modulus for place in range(len(tokens))]


# Elements of A5 are found among all orders of five by their determinant.
ELEMENTS = [
    order
    for order in itertools.permutations(range(5))
    if torch.linalg.det(torch.eye(5)[list(order)]) > 0
]


def permutations(tokens: list[int]) -> list[int]:
    cups, said = [0, 1, 2, 3, 4], []
    for token in tokens:
        cups = [ELEMENTS[token][cup] for cup in cups]
        said.append(ELEMENTS.index(tuple(cups)))
    return said


SOLVERS: dict[str, Callable[[list[int]], list[int]]] = {
    "copy": copy,
    "delayed_sum": delayed_sum,
    "modular_sum": modular_sum,
    "mqar": mqar,
    "parity": lambda tokens: modular_sum(tokens, 2),
    "permutations": permutations,
    "phonebook": phonebook,
    "predecessor_query": predecessor,
    "recall": recall,
    "reverse": reverse,
    "reverse_dual_frequency": reverse,
    "reverse_variable": reverse,
    "sort": sort,
}


@pytest.mark.parametrize("kind", KINDS)
def test_an_obvious_program_solves_it(kind: str) -> None:
    """The targets follow from the tokens, in training and in the test."""
    task = build(kind)
    length = LENGTHS.get(kind, 8)
    drawn = task.sample(300, length=length, seed=1)
    for batch in (drawn, task.evaluation_batch(0, 300, length=length)):
        said = torch.tensor([SOLVERS[kind](row) for row in batch.tokens.tolist()])
        for name, values in task.score(said, batch).items():
            assert (values == 1).all(), name


@pytest.mark.parametrize("kind", KINDS)
def test_training_rejects_the_held_out_sequences(kind: str) -> None:
    size = 6 if "dual" in kind else SIZES.get(kind, 4)
    task = build(kind, vocab_size=size, held_out=3, **({"n_pairs": 1} if kind == "mqar" else {}))
    longer = {"delayed_sum": 4, "mqar": 4, "parity": 3, "phonebook": 6, "predecessor_query": 4}
    length = {**longer, "recall": 4}.get(kind, 2)
    held_out = {tuple(row) for row in task.evaluation_batch(0, 3, length=length).tokens.tolist()}
    generator = torch.Generator().manual_seed(0)
    batch = task.sample(3000, length=length, seed=0)
    seen = {tuple(row) for row in batch.tokens.tolist()}
    assert not seen & held_out
    drawn = {tuple(row) for row in task._batch(task.draw(3000, length, generator)).tokens.tolist()}
    assert held_out & drawn
    assert seen == drawn - held_out


def test_lengths_of_reverse_variable_are_uniform() -> None:
    batch = build("reverse_variable").sample(3000, length=8, seed=0)
    lengths = batch.answers().sum(1)
    shares = torch.bincount(lengths, minlength=9)[4:] / 3000
    assert lengths.min() == 4
    assert lengths.max() == 8
    assert ((shares - 0.2).abs() < 0.035).all()
    assert batch.tokens.shape == (3000, 16)


@pytest.mark.parametrize("power", [0.01, 1.0])
def test_distances_of_queries_follow_a_power_law(power: float) -> None:
    """The distance of a query from its pair has the probabilities of zoology's definition."""
    batch = build("mqar", n_pairs=1, power=power).sample(4000, length=10, seed=0)
    shares = batch.answers()[:, 2::2].float().mean(0)
    expected = torch.arange(1.0, 5.0) ** (power - 1)
    assert (shares - expected / expected.sum()).abs().max() < 0.03
    assert not batch.answers()[:, 1::2].any()
    everywhere = batch.tokens[:, 2:][~batch.answers()[:, 2:]]
    assert everywhere.unique().tolist() == list(range(32))


def test_dual_frequencies() -> None:
    task = build("reverse_dual_frequency")
    x = task.sample(2000, length=8, seed=0).tokens[:, :8]
    assert abs(float((x >= 16).float().mean()) - 0.125) < 0.011
    assert x.unique().tolist() == list(range(32))
    test = task.evaluation_batch(0, 1024, length=8)
    assert (test.answers().sum(1) == 1).all()
    assert test.answers()[:, 8:].any(0).all()  # every place has its turn
    scored = test.answers()[:, 8:].flip(1)
    rare = test.tokens[:, :8] >= 16
    for index, (target, others) in enumerate([(0, 0), (0, 1), (1, 0), (1, 1)]):
        rows = torch.arange(1024) % 4 == index
        assert (rare[rows][scored[rows]] == target).all()
        assert (rare[rows][~scored[rows]] == others).all()
