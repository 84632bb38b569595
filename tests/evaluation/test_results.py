"""Results files: rows are read as written, and damage is reported with its line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from longrnn.errors import UserError
from longrnn.results import Results, Row, line_of, read_results

pytestmark = pytest.mark.core

HEADER = {"evaluation": "passkey", "model": "größer"}
ROWS: list[dict[str, Any]] = [
    {"index": 0, "said": "71 \u2028", "score": 0.1},
    {"index": 1, "text_sha256": "a", "score": float("inf")},
    {"index": 2, "nested": [{"a": None}]},
    {},
]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Return a file with a header and four rows."""
    results = Results(tmp_path / "r.jsonl", HEADER)
    results.append(ROWS[:1])
    results.append(ROWS[1:])
    return tmp_path / "r.jsonl"


def test_rows_come_back_without_their_checksums(path: Path) -> None:
    """Readers get the measured values; every line is JSON with its checksum last."""
    assert read_results(path) == (HEADER, ROWS)
    before = path.read_bytes()
    assert Results(path, HEADER).rows == ROWS
    assert path.read_bytes() == before
    for line in path.read_text().splitlines():
        *_, last = json.loads(line)
        assert last == "sha256"


def test_every_flipped_bit_is_noticed_and_its_line_named(path: Path) -> None:
    """Damage in a row, checksum or line end is reported; a last row without line end is dropped."""
    whole = path.read_bytes()
    for place in range(len(whole)):
        line = whole[:place].count(b"\n") + 1
        for bit in range(8):
            damaged = bytearray(whole)
            damaged[place] ^= 1 << bit
            path.write_bytes(damaged)
            if place == len(whole) - 1:
                assert read_results(path) == (HEADER, ROWS[:-1])
                continue
            with pytest.raises(UserError) as error:
                read_results(path)
            message = str(error.value)
            assert "\n" not in message
            assert f"{path}, line {line}" in message


def test_the_remedy_works(path: Path) -> None:
    """The file can be read again after the reported line is deleted."""
    lines = path.read_bytes().splitlines(keepends=True)
    lines[2] = lines[2].replace(b"1", b"3", 1)
    path.write_bytes(b"".join(lines))
    with pytest.raises(UserError, match="line 3"):
        Results(path, HEADER)
    assert path.read_bytes() == b"".join(lines), "nothing is written over a damaged file"
    path.write_bytes(b"".join([*lines[:2], *lines[3:]]))
    assert Results(path, HEADER).rows == [ROWS[0], *ROWS[2:]]


@pytest.mark.parametrize("cut", range(1, 60))
def test_a_torn_last_row_is_dropped(path: Path, cut: int) -> None:
    """Complete rows are read, wherever a killed process stopped writing."""
    whole = path.read_bytes()
    path.write_bytes(whole[:-cut])
    kept = whole[:-cut].count(b"\n") - 1
    assert read_results(path) == (HEADER, ROWS[:kept])
    assert Results(path, HEADER).rows == ROWS[:kept]


def test_a_repeated_header_is_not_a_row(path: Path) -> None:
    """Files of one evaluation that were joined are read as one."""
    path.write_bytes(path.read_bytes() + path.read_bytes())
    assert Results(path, HEADER).rows == ROWS * 2
    assert path.read_text().count(line_of(HEADER)) == 1


def test_files_without_checksums_are_read_and_get_them(path: Path) -> None:
    """Results of earlier versions are resumed, and their damaged lines are reported."""
    old = [json.dumps(row) + "\n" for row in [HEADER, ROWS[0], *ROWS[2:]]]
    path.write_text("".join(old))
    results = Results(path, HEADER)
    assert results.rows == [ROWS[0], *ROWS[2:]]
    results.append(ROWS[1:2])
    assert path.read_text() == "".join(map(line_of, [HEADER, ROWS[0], *ROWS[2:], ROWS[1]]))
    old[2] = old[2][5:]
    path.write_text("".join(old))
    with pytest.raises(UserError, match="line 3"):
        read_results(path)


def part_of(path: Path, rows: list[Row], *, torn: bytes = b"") -> Path:
    """The part that a second process left, with a torn last line."""
    part = path.with_name(f".{path.name}.part-1")
    lines = "".join(map(line_of, [HEADER_OF_PARTS, *rows]))
    part.write_bytes(lines.encode() + torn)
    return part


HEADER_OF_PARTS: Row = {"evaluation": "parts"}


def test_parts_of_killed_processes_are_merged_once(tmp_path: Path) -> None:
    """Rows of a part join the file; those of a merge that was killed are not doubled."""
    path = tmp_path / "r[1].jsonl"
    Results(path, HEADER_OF_PARTS).append([{"a": 0}, {"a": 1}])
    part = part_of(path, [{"a": 1}, {"a": 2}], torn=b'{"a": 3, "sh')
    results = Results(path, HEADER_OF_PARTS)
    assert results.rows == [{"a": 0}, {"a": 1}, {"a": 2}]
    assert read_results(path) == (HEADER_OF_PARTS, results.rows)
    assert not part.exists()
    results.append([{"a": 4}])
    assert read_results(path)[1][-1] == {"a": 4}


def test_a_part_without_a_whole_line_is_dropped(tmp_path: Path) -> None:
    """A process that was killed while it wrote its first line leaves nothing behind."""
    path = tmp_path / "r.jsonl"
    part = path.with_name(f".{path.name}.part-1")
    part.write_bytes(b'{"evalu')
    assert Results(path, HEADER_OF_PARTS).rows == []
    assert not part.exists()


def test_a_part_of_another_run_is_refused(tmp_path: Path) -> None:
    """A part with another header is not merged, and stays as it is."""
    path = tmp_path / "r.jsonl"
    part = part_of(path, [{"a": 1}])
    with pytest.raises(UserError, match="part-1"):
        Results(path, {"evaluation": "other"})
    assert part.exists()
