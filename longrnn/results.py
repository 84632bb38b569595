"""Results as JSON Lines: one header that says what was measured, then one row per sample.

Rows are on disk before the next batch begins; a killed evaluation goes on where it stopped, and a
torn last line is dropped.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from longrnn.errors import UserError
from longrnn.files import write_atomic

Row = dict[str, Any]


class Results:
    """The rows of one evaluation.

    Args:
        path: the file; its folder is made where it is missing.
        header: what makes two evaluations the same; lengths and counts do not belong in it, so
            that a file can grow.

    Raises:
        UserError: the file holds the results of something else.
    """

    def __init__(self, path: Path, header: Row) -> None:
        self.path = path
        self.rows: list[Row] = []
        if not path.is_file():
            write_atomic(path, json.dumps(header) + "\n")
            return
        found, rows = read_results(path)
        if found != header:
            names = [n for n in {**found, **header} if found.get(n) != header.get(n)]
            raise UserError(
                f"{path} holds the results of another run (different {', '.join(names)}): "
                "choose another output folder"
            )
        self.rows = rows
        write_atomic(path, "".join(json.dumps(row) + "\n" for row in [header, *rows]))

    def append(self, rows: Iterable[Row]) -> None:
        """Adds rows and makes them durable."""
        new = list(rows)
        with open(self.path, "a") as file:
            file.write("".join(json.dumps(row) + "\n" for row in new))
            file.flush()
            os.fsync(file.fileno())
        self.rows.extend(new)


def read_results(path: Path) -> tuple[Row, list[Row]]:
    """Header and rows of a results file; a last line without its end is left out.

    Raises:
        UserError: not a results file.
    """
    lines = path.read_text(errors="replace").splitlines(keepends=True)
    try:
        header, *rows = [json.loads(line) for line in lines if line.endswith("\n")]
        if not all(isinstance(row, dict) for row in (header, *rows)):
            raise ValueError("a line is not a JSON object")
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is not a results file ({error}): choose another folder") from error
    return header, rows
