"""Files that survive a kill: written beside the target, synced, then renamed; and their names."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from longrnn.errors import UserError

# Bytes of a file's name, of the 255 that file systems take; endings come on top.
LONGEST_NAME = 100


def write_atomic(path: Path, content: bytes | memoryview | str) -> None:
    """Replaces `path` by `content`; a reader (or a crash) sees the old or the new.

    What is beside it after a kill is replaced by the next writer: there is one at a time.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.partial")
    try:
        with naming(path):
            _write(beside, "wb", content.encode() if isinstance(content, str) else content)
            os.replace(beside, path)
    finally:
        beside.unlink(missing_ok=True)
    sync_folder(path.parent)


def append(path: Path, content: bytes) -> None:
    """Adds to the end of a file, and makes it durable."""
    with naming(path):
        _write(path, "ab", content)


def _write(path: Path, mode: str, content: bytes | memoryview) -> None:
    with open(path, mode) as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Within this context the error of a full disk, which names no file, gets this name."""
    try:
        yield
    except OSError as error:
        error.filename = error.filename or str(path)
        raise


def read_json(path: Path) -> dict[str, Any]:
    """A JSON file that holds a mapping.

    Raises:
        UserError: it is missing, cannot be read, or holds something else.
    """
    try:
        content = json.loads(path.read_bytes())
    except (ValueError, OSError, RecursionError) as error:
        raise UserError(f"{path} cannot be read ({one_line(error)}): copy it again") from error
    if not isinstance(content, dict):
        raise UserError(f"{path} is not a mapping of keys to values: copy it again")
    return content


def one_line(error: BaseException) -> str:
    """The first sentence of an error's message, on one line; its type where it has no message."""
    sentence = re.split(r"[.!?] +(?=[A-Z])", " ".join(str(error).split()), maxsplit=1)[0]
    return sentence.rstrip(".") or type(error).__name__


def sync_folder(folder: Path) -> None:
    """Makes renames inside `folder` durable."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sha256(path: Path) -> str:
    """Hexadecimal SHA-256 of a file's bytes.

    Raises:
        OSError: it is missing or not a regular file: a pipe or a device might not end.
    """
    if not path.is_file():
        raise FileNotFoundError(errno.ENOENT, "no such file", str(path))
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def file_name(text: str) -> str:
    """A file name for `text` that any file system takes, a different one for every text."""
    plain = re.sub(r"[^\w.,=()+-]+", "_", text)
    if plain == text and plain.strip(".") and len(plain.encode()) <= LONGEST_NAME:
        return plain
    digest = hashlib.sha256(os.fsencode(text)).hexdigest()[:8]
    return f"{plain.encode()[:LONGEST_NAME].decode(errors='ignore')}-{digest}"
