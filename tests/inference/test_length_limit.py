"""Texts that are too long for a model are refused before anything is computed."""

from __future__ import annotations

from pathlib import Path

import pytest

from longrnn.data import Passkey
from longrnn.data.prompts import Needle
from longrnn.errors import UserError
from longrnn.evaluation import passkey
from longrnn.hf.opened import OpenCheckpoint
from tests.comparison.suites.small_models import SHORT, small_model


def test_prompt_and_answer_must_fit_within_the_limit(tmp_path: Path) -> None:
    """A prompt that leaves no room for the answer is refused; a shorter one is evaluated."""
    one = small_model("short", position=SHORT)
    subject = OpenCheckpoint(one.name, one.model, one.tokenizer)
    with pytest.raises(UserError, match="300"):
        passkey.refuse_out_of_reach([subject], Grid([200, 300], 1, [0.5]))
    fits = Grid([200, 290], 1, [0.5])
    passkey.refuse_out_of_reach([subject], fits)
    output = tmp_path / "results.jsonl"
    rows = passkey.evaluate([subject], fits, output=output)
    assert len(rows) == 2


def test_with_chunk_selection_only_a_chunk_must_fit(tmp_path: Path) -> None:
    """The limit applies to header, chunk, question and answer, whatever the prompt's length."""
    one = small_model("short", position=SHORT)
    task, needle = Passkey(one.tokenizer), Needle("01234", 0.5)
    fits = 300 - task.n_header - len(task.question(needle)) - len(task.answer(needle))

    def measure(length: int, chunk: int) -> None:
        evaluation = PasskeyRetrieval(lengths=[length], n=1, depths=[0.5], chunk_select=chunk)
        run([one], [evaluation], tmp_path, quiet=True)

    measure(400, fits)
    with pytest.raises(UserError, match="300"):
        measure(400, fits + 1)
    measure(290, 1000)  # a chunk longer than the prompt contains the whole prompt
