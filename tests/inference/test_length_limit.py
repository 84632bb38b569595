"""Texts that are too long for a model are refused before anything is computed."""

from __future__ import annotations

from pathlib import Path

import pytest

from longrnn.errors import UserError
from longrnn.evaluation.passkey import PasskeyRetrieval
from longrnn.evaluation.run import run
from longrnn.inference.length_limit import refuse_long
from longrnn.tasks import Passkey
from longrnn.tasks.passkey_documents import Needle
from tests.evaluation.small_models import SHORT, small_model


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
    task, needle = Passkey(one.tokenizer), Needle("01234", 0.5)
    fits = 300 - task.n_header - len(task.question(needle)) - len(task.answer(needle))

    def measure(length: int, chunk: int) -> None:
        evaluation = PasskeyRetrieval(lengths=[length], n=1, depths=[0.5], chunk_select=chunk)
        run([one], [evaluation], tmp_path, quiet=True)

    measure(400, fits)
    with pytest.raises(UserError, match="300"):
        measure(400, fits + 1)
    measure(290, 1000)  # a chunk longer than the prompt contains the whole prompt
