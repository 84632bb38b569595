"""SHA-256 checksums of what longrnn writes, and how loading verifies them.

A folder with a model or a corpus holds `checksums.json`: file name → SHA-256. The files themselves
are as other programs write and read them. A folder without it is read without verification.
"""

import json
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from longrnn import files
from longrnn.errors import UserError
from longrnn.locks import locked

CHECKSUMS = "checksums.json"
# What loading a model reads; pickles only where there are no safetensors.
MODEL_FILES = ("*.json", "*.safetensors", "*.txt", "*.model", "*.jinja")
PICKLES = ("pytorch_model*.bin",)
READ = (*MODEL_FILES, *PICKLES)


def write_checksums(folder: Path, patterns: Iterable[str] = READ) -> None:
    """Writes `checksums.json` for the files of a folder, or adds them to it.

    Args:
        folder: the folder, whose files are complete.
        patterns: of the names of the files that are listed.
    """
    listed = folder / CHECKSUMS
    digests = files.read_json(listed) if listed.is_file() else {}
    digests |= {
        path.name: files.sha256(path)
        for path in sorted(folder.iterdir())
        if path.is_file() and path.name != CHECKSUMS and any(map(path.match, patterns))
    }
    files.write_atomic(listed, json.dumps(digests, indent=2) + "\n")


@contextmanager
def complete_folder(
    destination: Path, instead: str, *, patterns: Iterable[str] = READ
) -> Iterator[Path]:
    """A new folder that appears with all of its files and their checksums, or not at all.

    Args:
        destination: the folder, which does not exist or is empty.
        instead: what to do if it is in use, for the error message.
        patterns: of the names of the files that are listed in `checksums.json`.

    Yields:
        The folder to write into.

    Raises:
        UserError: the destination is in use.
    """
    if destination.exists() and (not destination.is_dir() or any(destination.iterdir())):
        raise UserError(f"{destination} exists already: {instead}")
    draft = files.partial_path(destination.absolute())
    with locked(destination, instead=instead):
        files.new_folder(draft)  # in place of what a killed process left
        try:
            yield draft
            write_checksums(draft, patterns)
            os.rename(draft, destination)
        finally:
            files.remove(draft)
    files.sync_folder(destination.parent)


def remove_checksums(folder: Path) -> None:
    """Removes `checksums.json`, which must come before the files that it lists are replaced."""
    (folder / CHECKSUMS).unlink(missing_ok=True)


def refuse_damage(folder: Path, remedy: str, patterns: Iterable[str] = ("*",)) -> None:
    """Compares files of a folder with its checksums.

    Args:
        folder: has a `checksums.json`.
        remedy: what to do about a damaged folder.
        patterns: of the names of the files that are read.

    Raises:
        UserError: a file is damaged or missing, `checksums.json` included.
    """
    try:
        for name, digest in files.read_json(folder / CHECKSUMS).items():
            if any(map(Path(name).match, patterns)) and files.sha256(folder / name) != digest:
                raise ValueError(f"{name!r} is not what was written")
    except (OSError, ValueError) as error:
        raise UserError(f"{folder} is damaged ({files.one_line(error)}): {remedy}") from error


def verify_folder(folder: Path, patterns: Iterable[str] = READ) -> None:
    """Compares files of a folder with their checksums, where there are any.

    Raises:
        UserError: a file is damaged or missing.
    """
    listed = folder / CHECKSUMS
    if listed.is_file():
        remedy = f"copy it again, or, if you changed it on purpose, delete {listed}"
        refuse_damage(folder, remedy, patterns)
