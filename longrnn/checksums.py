"""SHA-256 checksums of what longrnn writes, and how loading verifies them.

- A folder with a model or a corpus holds `checksums.json`: file name → SHA-256. The files
  themselves are as other programs write and read them.
- A safetensors file that stands alone, such as a state, carries its checksum in its metadata.

Whatever has no checksum, from an earlier version or another program, is read without one.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from fnmatch import fnmatch
from pathlib import Path
from typing import TYPE_CHECKING

from longrnn.errors import UserError
from longrnn.files import sha256, write_atomic

if TYPE_CHECKING:
    from torch import Tensor

CHECKSUMS = "checksums.json"
# What loading a model reads; pickles only where there are no safetensors.
MODEL_FILES = ("*.json", "*.safetensors", "*.txt", "*.model", "*.jinja")
PICKLES = ("pytorch_model*.bin",)
READ = (*MODEL_FILES, *PICKLES)
# The key of a file's own checksum in the metadata of safetensors, and what stands there while it is
# computed.
KEY, BLANK = "sha256", "0" * 64


def write_checksums(folder: Path, patterns: Iterable[str] = READ) -> None:
    """Writes `checksums.json` for the files of a folder.

    Args:
        folder: the folder, whose files are complete.
        patterns: of the names of the files that are listed.
    """
    digests = {
        path.name: sha256(path)
        for path in sorted(folder.iterdir())
        if path.is_file() and path.name != CHECKSUMS and _matches(path.name, patterns)
    }
    write_atomic(folder / CHECKSUMS, json.dumps(digests, indent=2) + "\n")


def remove_checksums(folder: Path) -> None:
    """Removes `checksums.json`, which must come before the files that it lists are replaced."""
    (folder / CHECKSUMS).unlink(missing_ok=True)


def read_checksums(folder: Path) -> dict[str, str]:
    """The content of `checksums.json`.

    Raises:
        ValueError: it cannot be read, or names no files; the message says which.
    """
    try:
        recorded = json.loads((folder / CHECKSUMS).read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{CHECKSUMS} cannot be read, {type(error).__name__}") from error
    if not isinstance(recorded, dict) or not recorded:
        raise ValueError(f"{CHECKSUMS} names no files")
    return recorded


def damage(folder: Path, patterns: Iterable[str] = ("*",)) -> str | None:
    """What is wrong with the files of a folder, by its checksums; None where all are whole.

    Args:
        folder: has a `checksums.json`.
        patterns: of the names of the files that are read.
    """
    try:
        recorded = read_checksums(folder)
    except ValueError as error:
        return str(error)
    for name, digest in recorded.items():
        if not _matches(name, patterns):
            continue
        try:
            found = sha256(folder / name)
        except (OSError, ValueError) as error:
            return f"{name!r} cannot be read, {type(error).__name__}"
        if found != digest:
            return f"{name!r} is not what was written"
    return None


def verify_folder(folder: Path, patterns: Iterable[str] = READ) -> None:
    """Compares files of a folder with their checksums, where there are any.

    Raises:
        UserError: one is damaged or missing.
    """
    if (folder / CHECKSUMS).is_file() and (wrong := damage(folder, patterns)) is not None:
        raise UserError(
            f"{folder} is damaged ({wrong}): copy it again, or, if you changed it on purpose, "
            f"delete {folder / CHECKSUMS}"
        )


def sealed(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> bytes:
    """A safetensors file whose metadata has the SHA-256 of the whole file.

    While it is computed, 64 zeros stand in its place.
    """
    from safetensors.torch import save

    content = save(dict(tensors), metadata={**metadata, KEY: BLANK})
    # The header comes first, so this is the first place with 64 zeros.
    return content.replace(BLANK.encode(), hashlib.sha256(content).hexdigest().encode(), 1)


def verify_sealed(path: Path, metadata: Mapping[str, str]) -> None:
    """Compares a safetensors file that `sealed` made with its checksum.

    Args:
        path: the file.
        metadata: its metadata, which have the checksum.

    Raises:
        UserError: it is damaged.
    """
    digest = metadata.get(KEY, "")
    content = path.read_bytes().replace(digest.encode(), BLANK.encode(), 1)
    if len(digest) != len(BLANK) or hashlib.sha256(content).hexdigest() != digest:
        raise UserError(f"{path} is damaged (its SHA-256 does not fit): save it again")


def _matches(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatch(name, pattern) for pattern in patterns)
