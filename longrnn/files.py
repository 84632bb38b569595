"""Files that survive a kill (written beside the target, synced, then renamed), and safe reading."""

import errno
import hashlib
import os
import re
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from io import BufferedReader
from pathlib import Path
from typing import Any, BinaryIO

from pydantic_core import from_json

from longrnn.errors import UserError

# Bytes of a file's name, of the 255 that file systems take; endings come on top.
LONGEST_NAME = 100


def partial_path(path: Path) -> Path:
    """Return where a file or folder is written before it is complete."""
    return path.with_name(f".{path.name}.partial")


def write_atomic(path: Path, content: bytes | memoryview | str) -> None:
    """Replaces `path` by `content`; a reader (or a crash) sees the old or the new.

    What is beside it after a kill is replaced by the next writer; two never write at the same time.

    Raises:
        OSError: it cannot be written, or is a folder, a pipe or a device, which are not replaced.
    """
    if path.exists() and not path.is_file():
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = partial_path(path)
    data = content.encode() if isinstance(content, str) else content
    try:
        with naming(path):
            partial.unlink(missing_ok=True)  # also a link, which is not followed
            with open(partial, "xb") as file:
                _write_durably(file, data)
            os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)
    sync_folder(path.parent)


def append(path: Path, content: bytes) -> None:
    """Adds to the end of a regular file, and makes it durable."""
    with naming(path), open(path, "ab", opener=_open_regular) as file:
        _write_durably(file, content)


def _write_durably(file: BinaryIO, content: bytes | memoryview) -> None:
    file.write(content)
    file.flush()
    os.fsync(file.fileno())


def _open_regular(path: str, flags: int) -> int:
    """Open a file for `open`; refuses pipes and devices, which may block or never end."""
    descriptor = os.open(path, flags | os.O_NONBLOCK, 0o666)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "not a regular file", path)
    return descriptor


def open_regular(path: Path) -> BufferedReader:
    """Open a regular file to read its bytes.

    Raises:
        OSError: it is missing, cannot be read, or is a folder, a pipe or a device.
    """
    return open(path, "rb", opener=_open_regular)


def read_bytes(path: Path) -> bytes:
    """Return the content of a regular file; see `open_regular`."""
    with open_regular(path) as file:
        return file.read()


def regular(path: Path) -> Path:
    """Return the path of a regular file, for libraries that open it; see `open_regular`."""
    open_regular(path).close()
    return path


def new_folder(path: Path) -> None:
    """Create an empty folder in place of what is there; a link is removed, not followed."""
    remove(path)
    path.mkdir(parents=True)


def remove(path: Path) -> None:
    """Remove a folder with its content, a file or a link, if it exists."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Within this context the error of a full disk, which names no file, gets this name."""
    try:
        yield
    except OSError as error:
        error.filename = error.filename or str(path)
        raise


def read_text(
    path: Path, remedy: str = "give a file of UTF-8 text", *, kind: str = "text file"
) -> tuple[str, str]:
    """Return a text without its byte-order mark, and the hexadecimal SHA-256 of the file's bytes.

    Args:
        path: of the file.
        remedy: what to do where it cannot be read.
        kind: what it is, for where it is missing.

    Raises:
        UserError: a file that is missing, unreadable, empty, not a regular file, or not UTF-8.
    """
    try:
        data = read_bytes(path) if path.is_file() else None
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}): {remedy}") from error
    if data is None:
        raise UserError(f"no {kind} {path}: {remedy}")
    if 0 in data:
        raise UserError(f"{path} is binary (a NUL at byte {data.index(0)}): {remedy}")
    try:
        text = data.decode().removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not UTF-8 (at byte {error.start}): {remedy}") from error
    if not text:
        raise UserError(f"{path} is empty: {remedy}")
    return text, hashlib.sha256(data).hexdigest()


def read_json(path: Path) -> dict[str, Any]:
    """A JSON file that holds a mapping.

    Raises:
        UserError: it is missing, cannot be read, or holds something else.
    """
    try:
        content = from_json(read_bytes(path))
    except (ValueError, OSError) as error:
        raise UserError(f"{path} cannot be read ({one_line(error)}): copy it again") from error
    if not isinstance(content, dict):
        raise UserError(f"{path} is not a mapping of keys to values: copy it again")
    return content


def one_line(error: BaseException) -> str:
    """The first sentence of an error's message, on one line; its type where it has no message."""
    if isinstance(error, OSError) and error.strerror:
        name = Path(str(error.filename or "")).name
        return f"{name}: {error.strerror}" if name else error.strerror
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
        OSError: see `open_regular`.
    """
    with open_regular(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def file_name(text: str) -> str:
    """A file name for `text` that any file system takes, a different one for every text."""
    plain = re.sub(r"[^\w.,=()+-]+", "_", text)
    if plain == text and plain.strip(".") and len(plain.encode()) <= LONGEST_NAME:
        return plain
    digest = hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()[:8]
    return f"{plain.encode()[:LONGEST_NAME].decode(errors='ignore')}-{digest}"
