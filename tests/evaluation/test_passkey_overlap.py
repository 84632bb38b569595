"""Passkeys in a text file: prompts that read the same text are not independent samples."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from longrnn.evaluation.passkey import summarise
from longrnn.evaluation.tables import print_passkey, print_passkey_inserted
from longrnn.intervals import independent_stretches, proportion
from tests.evaluation.oracles import Oracle
from tests.evaluation.test_passkey import measure

pytestmark = pytest.mark.core


def test_prompts_that_read_the_same_text_widen_the_interval(tmp_path: Path) -> None:
    """Prompts of one index begin at the same place of the file at every depth, and count once."""
    book = tmp_path / "book.txt"
    book.write_text("It was a dark and stormy night; the rain fell in torrents. " * 12)
    rows = measure(Oracle(), output=tmp_path / "r.jsonl", filler=book, lengths=[300], n=4)
    starts = {row["index"]: row["start"] for row in rows}
    assert all(row["start"] == starts[row["index"]] for row in rows)
    covers = 300 / len(book.read_bytes())
    assert {row["covers"] for row in rows} == {covers}
    expected = independent_stretches(list(starts.values()), covers)
    assert expected < 4
    found = summarise(rows)
    assert found[300, None] == proportion(12, 12, expected)
    assert found[300, 0.5] == proportion(4, 4, expected)
    assert found[300, None].low < proportion(12, 12).low
    plain = measure(Oracle(), output=tmp_path / "plain.jsonl", lengths=[300], n=4)
    assert summarise(plain)[300, None] == proportion(12, 12)


@pytest.mark.parametrize(
    ("place", "show"),
    [({"depth": 0.5}, print_passkey), ({"insert_at": 0}, print_passkey_inserted)],
)
def test_the_table_says_how_many_prompts_the_intervals_count(
    place: dict[str, Any], show: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """The table of prompts from a text file states how many of them count as independent."""
    row = {"model": "m", "length": 1000, **place, "index": 0, "correct": True}
    show("m", [row])
    assert "independent" not in capsys.readouterr().out
    show("m", [row | {"start": start, "covers": 0.2} for start in (0.0, 0.1)])
    assert "1.5 of 2" in capsys.readouterr().out
