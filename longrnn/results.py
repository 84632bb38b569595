"""A store of results: rows of JSON with checksums, found by what was measured.

A store is a folder. Every process of an evaluation appends to a file of its own, `rows.jsonl` or
`rows-RANK.jsonl`, and the results are the union of these files. A row is identified by its
evaluation, the fingerprints of model and tokenizer, the protocol (the settings that values depend
on) and the item, so that evaluations are resumed, and lengths, models and prompts are added, by one
lookup. A row is on disk before the next batch begins. A torn last line is dropped; a damaged line
is named and measured again.
"""

import hashlib
import json
import logging
import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import BaseModel

from longrnn import processes
from longrnn.errors import UserError
from longrnn.files import append, read_bytes, write_atomic
from longrnn.locks import hold

logger = logging.getLogger(__name__)

# What was measured of an item, and that with its identity.
Result = dict[str, Any]
StoredRow = dict[str, Any]
ROWS = "rows.jsonl"
# The beginning of a line, and its end: 8 hexadecimal digits of the SHA-256 of the row without them.
BEGINNING = b'{"evaluation": "'
CHECKSUM = re.compile(rb', "sha256": "([0-9a-f]{8})"\}$')


class Origin(NamedTuple):
    """What the rows of one model in one evaluation have in common.

    Attributes:
        evaluation: its kind.
        model: the model's fingerprint.
        tokenizer: the tokenizer's fingerprint.
        protocol: the settings that values depend on.
    """

    evaluation: str
    model: str
    tokenizer: str
    protocol: Mapping[str, Any]

    def key(self, item: Mapping[str, Any]) -> str:
        """Return the identity of the row of an item."""
        return json.dumps([*self, item], sort_keys=True)


class _Row(BaseModel, strict=True, extra="forbid"):
    """What a line holds: an `Origin`, an item and its result."""

    evaluation: str
    model: str
    tokenizer: str
    protocol: dict[str, Any]
    item: dict[str, Any]
    result: Result


class Store:
    """The rows in a folder, which is locked until this process ends.

    Where several processes share an evaluation, all of them create a store and call `collect`.

    Args:
        folder: created if missing.

    Raises:
        UserError: another command writes there, or a file of that name holds something else.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        rank = processes.rank()
        self._file = folder / (ROWS if rank == 0 else f"rows-{rank}.jsonl")
        self._results: dict[str, Result] = processes.on_main(self._open)
        self._added: dict[str, Result] = {}

    def get(self, origin: Origin, item: Mapping[str, Any]) -> Result | None:
        """Return the result of an item; None if it is not measured yet."""
        return self._results.get(origin.key(item))

    def append(self, origin: Origin, results: Iterable[tuple[Mapping[str, Any], Result]]) -> None:
        """Add the results of items, and make them durable."""
        rows = [{**origin._asdict(), "item": item, "result": result} for item, result in results]
        self.folder.mkdir(parents=True, exist_ok=True)
        append(self._file, b"".join(map(line_of, rows)))
        for key, result in map(_entry, rows):
            self._added[key] = self._results[key] = result

    def collect(self) -> None:
        """Wait for all processes, and take over what they added, also in place of older results."""
        for added in processes.gather(self._added):
            self._results |= added
        self._added = {}

    def _open(self) -> dict[str, Result]:
        hold(self.folder, instead="choose another --output")
        for path in self._files():
            _repair(path)
        return dict(_entry(row) for path in self._files() for row in read_rows(path)[0])

    def _files(self) -> list[Path]:
        return sorted(self.folder.glob("rows*.jsonl"))


def line_of(row: StoredRow) -> bytes:
    """Return a row as a line; its last key is a checksum of what is before it."""
    text = json.dumps(row).encode()
    return text[:-1] + b', "sha256": "' + _checksum(text) + b'"}\n'


def read_rows(path: Path) -> tuple[list[StoredRow], list[int]]:
    """Return the rows of a file, and the numbers of its damaged lines.

    What follows the last line end is a torn row and is left out.
    """
    rows, damaged = [], []
    for number, line in enumerate(read_bytes(path).split(b"\n")[:-1], 1):
        end = CHECKSUM.search(line)
        if end is not None and _checksum(text := line[: end.start()] + b"}") == end[1]:
            with suppress(ValueError):
                rows.append(_Row.model_validate_json(text).model_dump())
                continue
        damaged.append(number)
    return rows, damaged


def _repair(path: Path) -> None:
    """Remove torn and damaged lines from a file, and name the damaged ones."""
    (rows, damaged), content = read_rows(path), read_bytes(path)
    if not rows and not content.startswith(BEGINNING[: len(content)]):
        raise UserError(f"{path} has no row of results: remove it, or choose another --output")
    for number in damaged:
        logger.warning(f"{path}, line {number} is damaged: it is measured again")
    whole = b"".join(map(line_of, rows))
    if whole != content:
        write_atomic(path, whole)


def _entry(row: StoredRow) -> tuple[str, Result]:
    return Origin(*(row[name] for name in Origin._fields)).key(row["item"]), row["result"]


def _checksum(text: bytes) -> bytes:
    return hashlib.sha256(text).hexdigest()[:8].encode()
