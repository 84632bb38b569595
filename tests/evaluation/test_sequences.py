"""Evaluation of sequence tasks with models whose answers are known."""

from pathlib import Path
from typing import Any

from longrnn.evaluation.options import SequenceOptions
from longrnn.intervals import proportion
from longrnn.reporting.tables import ResultTable
from tests.evaluation import small_models
from tests.evaluation.small_models import SHORT, Answering, cells, small_model

TASK: dict[str, Any] = {"task": {"kind": "reverse", "vocab_size": 8, "held_out": 20}}


def mirror(*, swap: bool = False) -> Answering:
    """Reverses a sequence with V = 8; with `swap`, its first two answers change places."""

    def answer(ids: list[int]) -> int:
        x, asked = [i for i in ids if i < 8], ids.count(8)
        place = {1: 2, 2: 1}.get(asked, asked) if swap else asked
        return x[-place] if asked else 0

    return Answering(f"mirror {swap}", answer)


def measure(folder: Path, *models: Any, **options: Any) -> ResultTable:
    asked = TASK | {"lengths": [6], "batch_size": 8} | options
    return small_models.measure(SequenceOptions(**asked), folder, *models)


def test_scores(tmp_path: Path) -> None:
    """A model that reverses is right everywhere; two swapped tokens are wrong if they differ."""
    measure(tmp_path, mirror(swap=True), n=3)  # which is then not measured again
    outcome = measure(tmp_path, mirror(), mirror(swap=True))
    found = cells(outcome)
    assert found["task, token accuracy", 6, "model0"].estimate == proportion(20, 20)
    assert found["task, exact match", 6, "model0"].estimate == proportion(20, 20)
    swapped = [row for _, row in outcome.results["model1"]]
    shares = {(round(row["token_accuracy"], 3), row["exact_match"]) for row in swapped}
    assert {(0.667, 0.0)} <= shares <= {(1.0, 1.0), (0.667, 0.0)}
    wrong = sum(row["exact_match"] == 0 for row in swapped)
    assert wrong > 10
    assert found["task, exact match", 6, "model1"].difference.mean == -wrong / 20


def test_conditions(tmp_path: Path) -> None:
    task = {"kind": "reverse_dual_frequency", "vocab_size": 8, "held_out": 20}
    found = cells(measure(tmp_path, mirror(), task=task))
    names = [metric for metric, _, _ in found if not metric.startswith("task, ")]
    assert len(names) == 4
    assert sum(found[name, 6, "model0"].estimate.n for name in names) == 20


def test_a_length_out_of_reach(tmp_path: Path) -> None:
    found = cells(measure(tmp_path, small_model("short", position=SHORT), lengths=[100, 151], n=3))
    assert found["task, exact match", 100, "short"].estimate is not None
    assert "300" in str(found["task, exact match", 151, "short"])
