"""The store: rows are found by what was measured; damage is named and measured again."""

import json
from pathlib import Path

import pytest

from longrnn.errors import UserError
from longrnn.results import Origin, Store, read_rows

pytestmark = pytest.mark.core

ORIGIN = Origin("passkey", "größer", "bytes", {"seed": 0})
ITEMS = [{"length": 64, "index": k} for k in range(4)]
ROWS = [{"said": "71 \u2028"}, {"score": float("inf")}, {"nested": [{"a": None}]}, {}]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Return the file of a store of four rows."""
    store = Store(tmp_path)
    store.append(ORIGIN, [(ITEMS[0], ROWS[0])])
    store.append(ORIGIN, zip(ITEMS[1:], ROWS[1:], strict=True))
    return tmp_path / "rows.jsonl"


def found(path: Path) -> list[object]:
    store = Store(path.parent)
    return [store.get(ORIGIN, item) for item in ITEMS]


def test_rows_are_found_by_all_that_they_depend_on(path: Path) -> None:
    kept = path.read_bytes()
    assert found(path) == ROWS
    store = Store(path.parent)
    for name, other in {"evaluation": "x", "model": "x", "tokenizer": "x", "protocol": {}}.items():
        assert store.get(ORIGIN._replace(**{name: other}), ITEMS[0]) is None
    assert store.get(ORIGIN, {"length": 64, "index": 9}) is None
    assert path.read_bytes() == kept
    assert [list(json.loads(line))[-1] for line in path.read_text().splitlines()] == ["sha256"] * 4


def test_every_flipped_bit_is_noticed(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Damage costs the line that it is in, or at a line end that and the next one; none is used."""
    whole = path.read_bytes()
    kinds = {json.dumps(row) for row in read_rows(path)[0]}
    for place in range(len(whole) - 1):
        damaged = bytearray(whole)
        damaged[place] ^= 1 << place % 8
        path.write_bytes(damaged)
        rows, lines = read_rows(path)
        assert lines
        assert {json.dumps(row) for row in rows} < kinds
    path.write_bytes(whole.replace(b"71", b"72"))
    assert found(path) == [None, *ROWS[1:]]
    assert "line 1" in caplog.text
    assert read_rows(path)[1] == [], "the damaged line is gone"
    path.write_bytes(whole.splitlines(keepends=True)[0].replace(b"71", b"72"))
    assert found(path) == [None] * 4


@pytest.mark.parametrize("cut", [1, 17, 150])
def test_a_torn_last_row_is_dropped(path: Path, cut: int) -> None:
    whole = path.read_bytes()
    path.write_bytes(whole[:-cut])
    kept = whole[:-cut].count(b"\n")
    assert found(path) == [*ROWS[:kept], *[None] * (4 - kept)]
    Store(path.parent).append(ORIGIN, zip(ITEMS[kept:], ROWS[kept:], strict=True))
    assert path.read_bytes() == whole


def test_files_of_several_processes_are_one_store(path: Path) -> None:
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:1]))
    (path.parent / "rows-3.jsonl").write_bytes(b"".join(lines[1:]) + b'{"evalu')
    assert found(path) == ROWS


@pytest.mark.parametrize("content", ["not json\n", '{"a": 1}\n', '{"a": 1}'])
def test_a_file_of_something_else_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "rows.jsonl").write_text(content)
    with pytest.raises(UserError, match="output"):
        Store(tmp_path)
    assert (tmp_path / "rows.jsonl").read_text() == content
