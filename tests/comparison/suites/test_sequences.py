"""The kind `task` measures sequence tasks as `longrnn eval task` does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from longrnn.comparison.compare import compare
from longrnn.comparison.suites import Sequences, read_suite
from longrnn.data import Recall
from longrnn.errors import UserError
from longrnn.evaluation import sequences
from longrnn.hf.opened import OpenCheckpoint
from longrnn.intervals import paired_proportion, proportion
from longrnn.text import ByteTokenizer
from tests.comparison.suites.small_models import points, small_model
from tests.evaluation.test_sequences import Mirror

TASK: dict[str, Any] = {"kind": "recall", "vocab_size": 64}
SHORT: dict[str, Any] = {"kind": "learned", "max_length": 20, "combine": "add"}


def test_samples_are_those_of_the_evaluation_of_the_task(tmp_path: Path) -> None:
    """Token accuracy by held-out sequence, at every length."""
    one = small_model("one")
    evaluation = Sequences("recall", 0, task=TASK, lengths=["8", "16"], n=5)
    found = points(evaluation, one, tmp_path / "one.jsonl")
    assert [point.at for point in found] == [8, 16]
    for point in found:
        rows = sequences.evaluate(
            one.model, Recall(vocab_size=64), length=point.at or 0, n=5,
            output=tmp_path / f"direct-{point.at}.jsonl", quiet=True,
        )  # fmt: skip
        assert point.samples == {str(row["index"]): row["token_accuracy"] for row in rows}


def test_answers_that_are_all_right_leave_doubt(tmp_path: Path) -> None:
    """Token accuracies of 0 and 1 alone have Wilson's interval, and Newcombe's when paired."""
    evaluation = Sequences("reverse", 0, task={"kind": "reverse", "vocab_size": 8}, lengths=["6"])
    model: Any = Mirror()
    (point,) = points(
        evaluation, OpenCheckpoint("mirror", model, ByteTokenizer()), tmp_path / "one.jsonl"
    )
    values = list(point.samples.values())
    assert set(values) == {1}
    assert point.metric.estimate(values) == proportion(200, 200)
    assert point.metric.difference is not None
    assert point.metric.difference(values, values) == paired_proportion(values, values)


def test_a_length_that_a_model_cannot_read_has_a_reason(tmp_path: Path) -> None:
    """The width of the row counts: 16 tokens of pairs and 8 queries are 24 tokens."""
    (tmp_path / "mine.yaml").write_text(
        f"evaluations: [{{kind: task, task: {TASK}, lengths: [8, 16], n: 3}}]\n"
    )
    models = [small_model("one"), small_model("short", position=SHORT)]
    cells = compare(
        models, [read_suite(str(tmp_path / "mine.yaml"))], output=tmp_path / "out", quiet=True
    )
    by_place = {(cell.model, cell.at): cell for cell in cells}
    assert by_place["short", 8].difference is not None
    assert by_place["short", 16].estimate is None
    assert "20" in str(by_place["short", 16])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"task": {"kind": "recal"}}, "recall"),
        ({"task": {"kind": "passkey"}}, "passkey"),
        ({"task": TASK, "n": 2000}, "1024"),
        ({"task": TASK, "n": 0}, "batch_size"),
        ({"task": TASK, "lengths": ["7"]}, "length"),
    ],
)
def test_options_that_do_not_fit_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        Sequences("recall", 0, **{"lengths": ["8"], **options})


def test_a_model_with_fewer_ids_than_the_task_is_refused(tmp_path: Path) -> None:
    evaluation = Sequences("recall", 0, task={**TASK, "vocab_size": 4096}, lengths=["8"])
    with pytest.raises(UserError, match="4096"):
        points(evaluation, small_model("one"), tmp_path / "one.jsonl")
