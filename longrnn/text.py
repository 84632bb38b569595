"""Text: reading it from files, and tokenizers, of which the byte-level one needs no file."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from longrnn.errors import UserError


class Tokenizer(Protocol):
    """Text to ids and back. No special tokens are added."""

    vocab_size: int

    def encode(self, text: str) -> list[int]:
        """The ids of a text."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids."""
        ...

    def byte_ends(self, text: str) -> Sequence[int] | None:
        """Where each token of `encode(text)` ends, in bytes of UTF-8 from the start of the text.

        Bytes that no token stands for count to the next one, or to the last. None where the
        tokenizer cannot tell.
        """
        ...

    def fingerprint(self) -> str:
        """A short text: equal if and only if the ids of every text are."""
        ...


class ByteTokenizer:
    """One id per byte of UTF-8, 256 in all."""

    vocab_size = 256

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, ids: Sequence[int]) -> str:
        """The text; bytes that are no UTF-8 come out as U+FFFD."""
        return bytes(ids).decode(errors="replace")

    def byte_ends(self, text: str) -> Sequence[int] | None:
        return range(1, len(text.encode()) + 1)

    def fingerprint(self) -> str:
        return "bytes"


def read_text(path: Path) -> tuple[str, str]:
    """A text file and the hexadecimal SHA-256 of its bytes.

    Raises:
        UserError: a file that is missing, unreadable, empty, or no UTF-8 text.
    """
    remedy = "give a file of UTF-8 text"
    if not path.exists():
        raise UserError(f"no text file {path}: {remedy}")
    try:
        data = path.read_bytes()
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}): {remedy}") from error
    if not data:
        raise UserError(f"{path} is empty: {remedy}")
    if 0 in data:
        raise UserError(f"{path} is binary (a NUL at byte {data.index(0)}): {remedy}")
    try:
        return data.decode(), hashlib.sha256(data).hexdigest()
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not UTF-8 (at byte {error.start}): {remedy}") from error
