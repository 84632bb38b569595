"""Files that survive a kill: written beside the target, synced, then renamed over it."""

from __future__ import annotations

import hashlib
import json
import os
import re
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from longrnn.errors import UserError


def write_atomic(path: Path, content: bytes | memoryview | str) -> None:
    """Replaces `path` by `content`; a reader (or a crash) sees the old or the new."""
    with replacing(path) as file:
        file.write(content.encode() if isinstance(content, str) else content)


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """A file to write piece by piece that replaces `path` at the end, or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        with naming(path), open(beside, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, path)
    finally:
        beside.unlink(missing_ok=True)
    sync_folder(path.parent)


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Within this context, an OSError names `path` where it names nothing, as on a full disk."""
    try:
        yield
    except OSError as error:
        if error.errno is not None and error.filename is None:
            error.filename = str(path)
        raise


def read_json(path: Path) -> dict[str, Any]:
    """A JSON file that holds a mapping.

    Raises:
        UserError: it is missing, cannot be read, or holds something else.
    """
    if not path.is_file():
        raise UserError(f"{path.parent} is incomplete (it has no {path.name}): copy it again")
    try:
        content = json.loads(path.read_bytes())
    except (ValueError, OSError) as error:
        raise UserError(f"{path} is not JSON ({one_line(error)}): copy it again") from error
    except RecursionError as error:
        raise UserError(f"{path} is not JSON (nested too deeply): copy it again") from error
    if not isinstance(content, dict):
        raise UserError(f"{path} is not a mapping of keys to values: copy it again")
    return content


def one_line(error: BaseException) -> str:
    """The message of an error on one line; its type where it has no message."""
    return " ".join(str(error).split()) or type(error).__name__


def leftovers(path: Path) -> list[Path]:
    """What calls of `write_atomic(path, …)` that were killed left beside `path`."""
    name = re.compile(rf"\.{re.escape(path.name)}\.[0-9a-f]{{8}}")
    if not path.parent.is_dir():
        return []
    return [beside for beside in path.parent.iterdir() if name.fullmatch(beside.name)]


def sync_folder(folder: Path) -> None:
    """Makes renames inside `folder` durable."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sha256(path: Path) -> str:
    """Hexadecimal SHA-256 of a file's bytes."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
