"""Results as JSON Lines: one header that says what was measured, then one row per sample.

Rows are on disk before the next batch begins; a killed evaluation goes on where it stopped, and a
torn last line is dropped. Every line carries a checksum, so that a damaged one is named.

Several processes (see `longrnn.processes`) write one file: the main process writes into it, and
every other one into a part beside it. `collect` merges the parts; those of processes that were
killed are merged when the file is opened the next time, by any number of processes.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from glob import escape
from pathlib import Path
from typing import Any

from longrnn import processes
from longrnn.errors import UserError
from longrnn.files import write_atomic
from longrnn.locks import Lock

Row = dict[str, Any]

# The end of a line: 8 hexadecimal digits of the SHA-256 of the row without them.
CHECKSUM = re.compile(rb',? ?"sha256": "([0-9a-f]{8})"\}$')


class Results:
    """The rows of one evaluation. While this object lives, no other command writes the file.

    Where several processes share an evaluation, all of them must create this object and call
    `collect`.

    Args:
        path: the file; its folder is made where it is missing.
        header: what makes two evaluations the same; lengths and counts do not belong in it, so
            that a file can grow.

    Attributes:
        rows: the rows of the file; until `collect`, without those that other processes added.

    Raises:
        UserError: the file holds the results of something else, or another command writes it.
    """

    def __init__(self, path: Path, header: Row) -> None:
        self.path = path
        self._header = header
        self._target = path if processes.is_main() else _part(path, processes.rank())
        self._lock = Lock.of_file(self._target, instead="choose another output folder")
        self.rows: list[Row] = processes.on_main(self._open)

    def append(self, rows: Iterable[Row]) -> None:
        """Adds rows and makes them durable."""
        new = list(rows)
        if not new:
            return
        lines = list(map(line_of, new))
        if not processes.is_main():
            self._lock.acquire()
            if not self._target.is_file():
                lines = [line_of(self._header), *lines]
        with open(self._target, "a") as file:
            file.write("".join(lines))
            file.flush()
            os.fsync(file.fileno())
        self.rows.extend(new)

    def collect(self) -> None:
        """Waits for all processes and merges what they added; then all of them have all rows."""
        if processes.size() == 1:
            return
        if not processes.is_main():
            self._lock.release()
        processes.wait()
        self.rows = processes.on_main(lambda: self._merge(self.rows))

    def _open(self) -> list[Row]:
        """Locks and reads the file, or begins it, and merges parts of killed processes."""
        self._lock.acquire()
        if not self.path.is_file():
            write_atomic(self.path, line_of(self._header))
            rows = []
        else:
            rows = self._read(self.path)
            write_atomic(self.path, "".join(map(line_of, [self._header, *rows])))
        return self._merge(rows)

    def _merge(self, rows: Sequence[Row]) -> list[Row]:
        """Adds the rows of all parts to the file, which has `rows`, and removes the parts."""
        with ExitStack() as locks:
            parts = sorted(self.path.parent.glob(f"{escape(_part(self.path, '').name)}*"))
            for part in parts:
                locks.enter_context(Lock.of_file(part, instead="choose another output folder"))
            lines = dict.fromkeys(map(line_of, rows))
            for part in parts:
                # A process that was killed before its first line end leaves nothing to keep.
                found = self._read(part) if b"\n" in part.read_bytes() else []
                # Of a merge that was killed, a row is in the file and still in its part.
                lines.update(dict.fromkeys(map(line_of, found)))
            if parts:
                write_atomic(self.path, "".join([line_of(self._header), *lines]))
            for part in parts:
                part.unlink()
        return read_results(self.path)[1] if parts else list(rows)

    def _read(self, path: Path) -> list[Row]:
        """Rows of the file, or of a part of it, which must have the header of this evaluation."""
        found, rows = read_results(path)
        if found != self._header:
            names = [
                name
                for name in {**found, **self._header}
                if found.get(name) != self._header.get(name)
            ]
            raise UserError(
                f"{path} holds the results of another run (different {', '.join(names)}): "
                "choose another output folder"
            )
        return rows


def _part(path: Path, rank: int | str) -> Path:
    """The file of the rows that a process other than the main one adds."""
    return path.with_name(f".{path.name}.part-{rank}")


def line_of(row: Row) -> str:
    """A row as a line of a results file; its last key is a checksum of what stands before it."""
    text = json.dumps(row)
    return f'{text[:-1]}{", " if row else ""}"sha256": "{_checksum(text.encode())}"}}\n'


def read_results(path: Path) -> tuple[Row, list[Row]]:
    """Header and rows of a results file; a last line without its end is left out.

    The header may be repeated, as in files of one evaluation that were joined.

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
    return found[0], [row for row in found[1:] if row != found[0]]


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
