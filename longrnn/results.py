"""Results as JSON Lines: one header that says what was measured, then one row per sample.

Rows are on disk before the next batch begins; a killed evaluation goes on where it stopped, and a
torn last line is dropped. Every line carries a checksum, so that a damaged one is named.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from longrnn.errors import UserError
from longrnn.files import write_atomic
from longrnn.locks import Lock

Row = dict[str, Any]

# The end of a line: 8 hexadecimal digits of the SHA-256 of the row without them.
CHECKSUM = re.compile(rb',? ?"sha256": "([0-9a-f]{8})"\}$')


class Results:
    """The rows of one evaluation. While this object lives, no other process writes the file.

    Args:
        path: the file; its folder is made where it is missing.
        header: what makes two evaluations the same; lengths and counts do not belong in it, so
            that a file can grow.

    Raises:
        UserError: the file holds the results of something else, or another process writes it.
    """

    def __init__(self, path: Path, header: Row) -> None:
        self.path = path
        self.rows: list[Row] = []
        self._lock = Lock.of_file(path, instead="choose another output folder")
        self._lock.acquire()
        if not path.is_file():
            write_atomic(path, line_of(header))
            return
        found, rows = read_results(path)
        if found != header:
            names = [n for n in {**found, **header} if found.get(n) != header.get(n)]
            raise UserError(
                f"{path} holds the results of another run (different {', '.join(names)}): "
                "choose another output folder"
            )
        self.rows = rows
        write_atomic(path, "".join(map(line_of, [header, *rows])))

    def append(self, rows: Iterable[Row]) -> None:
        """Adds rows and makes them durable."""
        new = list(rows)
        with open(self.path, "a") as file:
            file.write("".join(map(line_of, new)))
            file.flush()
            os.fsync(file.fileno())
        self.rows.extend(new)


def line_of(row: Row) -> str:
    """A row as a line of a results file; its last key is a checksum of what stands before it."""
    text = json.dumps(row)
    return f'{text[:-1]}{", " if row else ""}"sha256": "{_checksum(text.encode())}"}}\n'


def read_results(path: Path) -> tuple[Row, list[Row]]:
    """Header and rows of a results file; a last line without its end is left out.

    Where one line has a checksum all have, so that damage to the checksum itself is noticed too.
    Files of versions without checksums are read as they are.

    Raises:
        UserError: not a results file, or a damaged line.
    """
    lines = _whole_lines(path)
    if not lines:
        raise UserError(f"{path} is not a results file (it has no header): choose another folder")
    checked = any(map(CHECKSUM.search, lines))
    found = []
    for number, line in enumerate(lines, 1):
        try:
            found.append(_parsed(line, checked))
        except (ValueError, RecursionError) as error:
            raise UserError(_damage(path, number, error, checked)) from error
    return found[0], found[1:]


def has_checksums(path: Path) -> bool:
    """Whether a file holds rows that `line_of` wrote."""
    return any(map(CHECKSUM.search, _whole_lines(path)))


def _whole_lines(path: Path) -> list[bytes]:
    """The lines of a file; what follows the last line end is a torn row."""
    return path.read_bytes().split(b"\n")[:-1]


def _parsed(line: bytes, has_checksum: bool) -> Row:
    """The row of a line.

    Raises:
        ValueError: the line is not one that `line_of` wrote.
    """
    if has_checksum:
        end = CHECKSUM.search(line)
        if end is None:
            raise ValueError("its checksum is missing")
        line = line[: end.start()] + b"}"
        if _checksum(line) != end[1].decode():
            raise ValueError("its checksum does not fit")
    row = json.loads(line)
    if not isinstance(row, dict):
        raise ValueError("it is not a JSON object")
    return row


def _checksum(text: bytes) -> str:
    return hashlib.sha256(text).hexdigest()[:8]


def _damage(path: Path, number: int, error: Exception, checked: bool) -> str:
    if number == 1 and not checked:
        return f"{path} is not a results file ({error}): choose another folder"
    remedy = (
        "put the file back from a copy"
        if number == 1
        else "remove this line and give the command again, which measures what is missing"
    )
    return f"{path}, line {number} is damaged ({error}): {remedy}, or choose another output folder"
