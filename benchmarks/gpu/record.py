"""Results of the benchmark: rows, the file that survives an interruption, and the table."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from longrnn.files import write_atomic

PASSED, FAILED, MEASURED, NOT_RUN = "passed", "failed", "measured", "not run"
# In a dry run: called without an error, and not timed.
RAN = "ran, not timed"


@dataclass
class Row:
    """One result.

    Attributes:
        part: the part of the benchmark.
        name: what was measured or checked.
        status: `passed`, `failed`, `measured` (there is no limit, or nothing to compare with),
            `not run`, or `ran, not timed` in a dry run.
        value: the number that was measured: an error, or a figure in `unit`.
        limit: the largest value that passes.
        unit: of value and limit.
        bound: the least value that the ceilings of the device allow.
        ratio: to what `against` names; `limit` then applies to it where `limit_of` is `ratio`.
        against: the implementation compared with.
        limit_of: `value` or `ratio`.
        reason: why it failed or was not run.
    """

    part: str
    name: str
    status: str
    value: float | None = None
    limit: float | None = None
    unit: str = ""
    bound: float | None = None
    ratio: float | None = None
    against: str = ""
    limit_of: str = "value"
    reason: str = ""


class Record:
    """All rows of a run, written to a file after each one.

    Args:
        path: the file; None for none.
        about: device, versions, command and date.

    Attributes:
        ceilings: bytes and operations per second, once they are measured.
        rows: the results.
        begun: part and name of each piece of work that was started.
    """

    def __init__(self, path: Path | None, about: dict[str, Any]) -> None:
        self.path, self.about = path, about
        self.ceilings: dict[str, float] = {}
        self.rows: list[Row] = []
        self.begun: list[list[str]] = []

    def add(self, row: Row) -> None:
        """Adds a row, prints it and saves all rows."""
        self.rows.append(row)
        print(line(row), flush=True)
        self.save()

    def begin(self, part: str, name: str) -> bool:
        """Records that a piece of work starts; false if it has been started before."""
        if [part, name] in self.begun:
            return False
        self.begun.append([part, name])
        self.save()
        return True

    def save(self) -> None:
        """Writes the file as it is now; a reader sees the old or the new content."""
        if self.path is not None:
            content = {
                **self.about,
                "ceilings": self.ceilings,
                "rows": [asdict(row) for row in self.rows],
                "begun": self.begun,
            }
            write_atomic(self.path, json.dumps(content, indent=2) + "\n")

    def load(self) -> None:
        """Reads what another process wrote into the file."""
        assert self.path is not None
        content = json.loads(self.path.read_text())
        self.ceilings = content.pop("ceilings")
        self.rows = [Row(**row) for row in content.pop("rows")]
        self.begun = content.pop("begun")
        self.about = content

    def count(self, status: str) -> int:
        return sum(row.status == status for row in self.rows)

    def summary(self) -> str:
        """What failed, what was not checked, and how many rows have each status."""
        unchecked = [row for row in self.rows if row.limit is not None and row.status == MEASURED]
        missing = [row for row in self.rows if row.status == NOT_RUN] + unchecked
        listed = (
            ("Failed", [row for row in self.rows if row.status == FAILED]),
            ("Not checked", missing),
        )
        lines = [
            f"{title}: {row.part}: {' '.join(line(row).split())}"
            for title, rows in listed
            for row in rows
        ]
        statuses = (PASSED, FAILED, MEASURED, RAN, NOT_RUN)
        counts = {status: self.count(status) for status in statuses}
        counted = "; ".join(f"{count} {status}" for status, count in counts.items() if count)
        return "\n".join([*lines, counted])


HEADER = f"{'':50} {'value':>12} {'unit':9} {'bound':>9} {'÷ bound':>8} {'ratio':>8}  result"


def line(row: Row) -> str:
    """One line of the table."""
    share = None if not row.value or not row.bound else row.value / row.bound
    ratio = "" if row.ratio is None else f"{row.ratio:.2f}"
    result = row.status
    if row.limit is not None:
        result += f", limit {row.limit:g}" + (" × " if row.limit_of == "ratio" else "")
    if row.against and row.ratio is not None:
        result += f" (ratio to {row.against})"
    if row.reason:
        result += f": {row.reason}"
    return (
        f"{row.name:50} {_number(row.value):>12} {row.unit:9} {_number(row.bound):>9} "
        f"{'' if share is None else f'{share:.2f}':>8} {ratio:>8}  {result}"
    )


def _number(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:.3g}" if abs(value) < 1e3 else f"{value:,.0f}"
