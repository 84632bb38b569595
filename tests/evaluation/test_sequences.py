"""Evaluation of sequence tasks with models whose answers are known."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from longrnn.data import Reverse, ReverseDualFrequency
from longrnn.errors import UserError
from longrnn.evaluation import sequences
from longrnn.evaluation.sequences import evaluate, summarise
from longrnn.models import LMOutput
from longrnn.results import Row, read_results
from longrnn.state import LMState
from tests.refusals import naming


class Mirror:
    """Reverses a sequence with V = 8; with `swap`, its first two answers change places."""

    vocab_size = 9
    max_length = None

    def __init__(self, *, swap: bool = False, fails_after: int | None = None) -> None:
        self.swap, self.fails_after = swap, fails_after
        self.rows = 0

    def fingerprint(self) -> str:
        return f"mirror {self.swap}"

    def init_state(self, batch_size: int) -> LMState:
        return LMState(torch.zeros(batch_size, dtype=torch.long), ())

    def __call__(
        self, tokens: Tensor, state: LMState | None = None, *, keep: int | None = None
    ) -> LMOutput:
        if self.fails_after is not None and self.rows >= self.fails_after:
            raise KeyboardInterrupt
        self.rows += len(tokens)
        half = tokens.shape[1] // 2
        said = tokens[:, :half].flip(1)
        if self.swap:
            said[:, :2] = said[:, :2].flip(1)
        said = torch.cat([tokens[:, :half], said], dim=1)
        assert state is not None
        return LMOutput(torch.nn.functional.one_hot(said, 9).float(), state)


def measure(model: Any, output: Path, **changes: Any) -> list[Row]:
    task = Reverse(vocab_size=8, held_out=20)
    settings = {"length": 6, "n": 20, "batch_size": 8, "quiet": True, **changes}
    return evaluate(model, task, output=output, **settings)


def test_an_oracle_is_right_everywhere(tmp_path: Path) -> None:
    """A model that reverses exactly has perfect scores."""
    rows = measure(Mirror(), tmp_path / "r.jsonl")
    assert [row["index"] for row in rows] == list(range(20))
    for row in rows:
        assert (row["token_accuracy"], row["exact_match"], row["edit_distance"]) == (1, 1, 0)
    scores = summarise(rows)
    assert scores["exact_match"].mean == 1
    assert scores["exact_match"].low < 0.9  # Wilson: twenty samples are not certainty
    assert scores["edit_distance"].mean == 0


def test_a_model_that_swaps_is_wrong(tmp_path: Path) -> None:
    """Two swapped answers give the known scores."""
    rows = measure(Mirror(swap=True), tmp_path / "r.jsonl")
    task = Reverse(vocab_size=8, held_out=20)
    sequences = task.evaluation_batch(0, 20, length=6).tokens[:, :6].tolist()
    for row, sequence in zip(rows, sequences, strict=True):
        same = sequence[-1] == sequence[-2]  # swapping two equal tokens changes nothing
        assert row["edit_distance"] == (0 if same else 1)
        assert row["exact_match"] == (1 if same else 0)
        assert row["token_accuracy"] == pytest.approx(1 if same else 4 / 6)
    assert summarise(rows)["exact_match"].mean < 0.5


def test_it_goes_on_where_it_stopped(tmp_path: Path) -> None:
    """A resumed evaluation asks for missing sequences only."""
    output = tmp_path / "r.jsonl"
    straight = measure(Mirror(), tmp_path / "straight.jsonl")
    with pytest.raises(KeyboardInterrupt):
        measure(Mirror(fails_after=8), output)
    with open(output, "a") as file:
        file.write('{"index": 8, "tok')
    again = Mirror()
    assert measure(again, output) == straight
    assert again.rows == 12
    assert output.read_text() == (tmp_path / "straight.jsonl").read_text()


def test_a_row_that_was_removed_is_measured_again(tmp_path: Path) -> None:
    """After a damaged line is deleted, that sequence alone is evaluated again."""
    output = tmp_path / "r.jsonl"
    straight = measure(Mirror(), output)
    header, *lines = output.read_text().splitlines(keepends=True)
    for gone in (3, 4, 17):
        lines[gone] = ""
    output.write_text("".join([header, *lines]))
    model = Mirror()
    assert measure(model, output) == straight
    assert model.rows == 3
    assert sorted(row["index"] for row in read_results(output)[1]) == list(range(20))


def test_more_and_fewer_sequences(tmp_path: Path) -> None:
    """A larger n measures only the new sequences; a smaller n keeps the other rows in the file."""
    output = tmp_path / "r.jsonl"
    measure(Mirror(), output, n=5)
    model = Mirror()
    assert len(measure(model, output)) == 20
    assert model.rows == 15
    assert len(measure(Mirror(), output, n=3)) == 3
    assert len(read_results(output)[1]) == 20


def test_all_held_out_sequences_are_asked_by_default(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By default at most 1,024 held-out sequences are evaluated."""
    assert len(measure(Mirror(), tmp_path / "all.jsonl", n=None)) == 20
    monkeypatch.setattr(sequences, "MAX_SEQUENCES", 12)
    assert len(measure(Mirror(), tmp_path / "most.jsonl", n=None)) == 12


def test_what_does_not_fit_is_refused(tmp_path: Path) -> None:
    """A model with too few ids and an n out of range raise a UserError."""
    output = tmp_path / "new/r.jsonl"
    with pytest.raises(UserError, match="20"):
        measure(Mirror(), output, n=21)
    with pytest.raises(UserError, match="20"):
        measure(Mirror(), output, n=0)
    with pytest.raises(UserError, match="length"):
        measure(Mirror(), output, length=0)
    narrow = Mirror()
    narrow.vocab_size = 8
    with pytest.raises(UserError, match=naming(9, 8)):
        measure(narrow, output)
    assert not output.parent.exists()


def test_results_of_another_run_are_refused(tmp_path: Path) -> None:
    """Results of another length or model are refused."""
    output = tmp_path / "r.jsonl"
    measure(Mirror(), output)
    before = output.read_bytes()
    with pytest.raises(UserError, match="length"):
        measure(Mirror(), output, length=7)
    with pytest.raises(UserError, match="model"):
        measure(Mirror(swap=True), output)
    assert output.read_bytes() == before


def test_scores_by_condition(tmp_path: Path) -> None:
    """Scores are kept by condition, with intervals inside [0, 1]."""

    class Forgetful(Mirror):
        """Answers 0 for every rare token."""

        def __call__(self, *args: Any, **options: Any) -> LMOutput:
            output = super().__call__(*args, **options)
            answers = output.logits.argmax(-1)
            answers[answers >= 4] = 0
            return output._replace(logits=torch.nn.functional.one_hot(answers, 9).float())

    task = ReverseDualFrequency(vocab_size=8, held_out=40)
    rows = evaluate(Forgetful(), task, length=4, output=tmp_path / "r.jsonl", quiet=True)
    assert [row["condition"] for row in rows] == [task.condition(i) for i in range(40)]
    scores = summarise(rows)
    for index in range(4):
        condition = task.condition(index)
        assert condition is not None
        share = scores[condition]
        assert share.n == 10
        assert share.mean == float(index < 2)  # the first two have frequent targets
        assert 0 <= share.low <= share.high <= 1
    assert scores["token_accuracy"].mean == 0.5
    header, _ = read_results(tmp_path / "r.jsonl")
    assert header["evaluation"] == "reverse_dual_frequency"
    with pytest.raises(UserError, match="rare_share"):
        other = ReverseDualFrequency(vocab_size=8, held_out=40, rare_share=0.5)
        evaluate(Forgetful(), other, length=4, output=tmp_path / "r.jsonl", quiet=True)
