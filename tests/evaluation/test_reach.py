"""What a model cannot reach is refused before anything is measured."""

from __future__ import annotations

from pathlib import Path

import pytest

from longrnn.errors import UserError
from longrnn.evaluation import passkey
from longrnn.evaluation.passkey_grid import Grid
from longrnn.evaluation.reach import refuse_long
from tests.evaluation.suites.contenders import SHORT, contender


def test_a_passkey_is_asked_where_its_answer_fits(tmp_path: Path) -> None:
    """A file with a header and no row, of prompts that leave no room for an answer."""
    one = contender("short", position=SHORT)
    subject = passkey.Subject(one.name, one.model, one.tokenizer)
    with pytest.raises(UserError, match="300"):
        passkey.refuse_out_of_reach([subject], Grid([200, 300], 1, [0.5]))
    fits = Grid([200, 290], 1, [0.5])
    passkey.refuse_out_of_reach([subject], fits)
    output = tmp_path / "results.jsonl"
    rows = passkey.evaluate([subject], lengths=[200, 290], depths=[0.5], n=1, output=output)
    assert len(rows) == 2


def test_refuse_long() -> None:
    """A length that is refused and would do."""
    model = contender("short", position=SHORT).model
    refuse_long(model, 300)
    with pytest.raises(UserError, match="300"):
        refuse_long(model, 301)
    refuse_long(contender("endless").model, 2**40)
