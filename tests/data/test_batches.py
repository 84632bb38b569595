"""The contract of every task: batches are functions of their arguments alone."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from longrnn.data import TASKS, UNSCORED, Task
from tests.texts import TEXTS
from tests.training.runs import assert_equal

OPTIONS: dict[str, dict[str, Any]] = {
    "text": {"data": TEXTS},
    "keyed_text": {"data": TEXTS, "keys": 9},
    "instruct": {"data": "pairs.jsonl"},
    "passkey": {"max_segments": 3},
}
LENGTHS = {
    "passkey": 180,
    "keyed_text": 180,
    "text": 40,
    "instruct": 40,
    "mqar": 32,
    "parity": 24,
    "phonebook": 24,
}
tasks = pytest.mark.parametrize("kind", sorted(TASKS))


@pytest.fixture(autouse=True)
def pairs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    made = [{"prompt": f"{k} and {k} are ", "completion": "same " * k} for k in range(1, 30)]
    rows = [json.dumps(row) for row in made]
    Path("pairs.jsonl").write_text("\n".join(rows))


def build(kind: str, **options: Any) -> Task:
    return TASKS.build({"kind": kind, **OPTIONS.get(kind, {}), **options}, None)


def ways(task: Task) -> list[bool]:
    return [False, True] if task.carries else [False]


@tasks
def test_two_processes_read_what_one_reads(kind: str) -> None:
    """Rows of a batch do not depend on which other rows are asked for, or in which order."""
    task, other = build(kind), build(kind)
    length = LENGTHS.get(kind, 8)
    for carried in ways(task):
        how: dict[str, Any] = {"of": 6, "length": length, "seed": 3, "carried": carried}
        whole = [task.batch(index, range(6), **how) for index in range(4)]
        for index in (3, 0, 2, 1):
            for rows in (range(4, 6), range(4)):
                part, expected = other.batch(index, rows, **how), whole[index].row(*rows)
                # Widths may differ by what is behind the last target.
                for name in ("tokens", "targets"):
                    ours, theirs = getattr(part, name), getattr(expected, name)
                    assert_equal(ours, theirs[:, : ours.shape[1]])
                assert torch.equal(part.begins, expected.begins)
        assert not torch.equal(whole[1].tokens, whole[0].tokens)
        again = task.batch(0, range(6), **{**how, "seed": 4})
        assert not torch.equal(again.tokens, whole[0].tokens)


@tasks
def test_perfect_predictions_score_perfectly(kind: str) -> None:
    task, length = build(kind), LENGTHS.get(kind, 8)
    batch = task.sample(4, length=length)
    for name, values in task.score(batch.targets, batch).items():
        assert (values == 1).all(), name
    wrong = batch.targets.clone()
    wrong[2, batch.answers()[2].nonzero()[-1]] ^= 1
    for name, values in task.score(wrong, batch).items():
        mistaken = (values < 1).nonzero().flatten().tolist()
        assert len(mistaken) == 1, name
        assert mistaken == [2] or len(values) == batch.answers().sum(), name  # by row or by token
    assert batch.answers().any(1).all()
    assert (batch.targets[batch.targets != UNSCORED] < task.vocab_size).all()
    assert_equal(task.held_out(3, length=length), task.held_out(3, length=length))
