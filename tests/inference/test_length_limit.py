"""Texts that are too long for a model are refused before anything is computed."""

from __future__ import annotations

from pathlib import Path

import pytest

from longrnn.data import Passkey
from longrnn.data.prompts import Needle
from longrnn.errors import UserError
from longrnn.evaluation import passkey
from longrnn.evaluation.passkey_grid import Grid
from longrnn.hf.opened import OpenCheckpoint
from longrnn.inference.length_limit import refuse_long
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


def test_only_lengths_beyond_the_limit_are_refused() -> None:
    """A model without a limit takes any length."""
    model = small_model("short", position=SHORT).model
    refuse_long(model, 300)
    with pytest.raises(UserError, match="300"):
        refuse_long(model, 301)
    refuse_long(small_model("endless").model, 2**40)


def test_with_chunk_selection_only_a_chunk_must_fit(tmp_path: Path) -> None:
    """The limit applies to header, chunk, question and answer, whatever the prompt's length."""
    one = small_model("short", position=SHORT)
    subject = OpenCheckpoint(one.name, one.model, one.tokenizer)
    grid = Grid([400], 1, [0.5])
    task = Passkey(one.tokenizer)
    needle = Needle("01234", 0.5)
    fits = 300 - task.n_header - len(task.question(needle)) - len(task.answer(needle))
    passkey.refuse_out_of_reach([subject], grid, chunk=fits)
    passkey.evaluate([subject], grid, chunk=fits, output=tmp_path / "results.jsonl")
    with pytest.raises(UserError, match="300"):
        passkey.refuse_out_of_reach([subject], grid, chunk=fits + 1)
    # A chunk longer than the prompt contains the whole prompt.
    passkey.refuse_out_of_reach([subject], Grid([290], 1, [0.5]), chunk=1000)
