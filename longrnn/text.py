"""Tokenizers: what the package needs of one, and the byte-level one that needs no file."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class Tokenizer(Protocol):
    """Text to ids and back. No special tokens are added."""

    vocab_size: int

    def encode(self, text: str) -> list[int]:
        """The ids of a text."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids."""
        ...


class ByteTokenizer:
    """One id per byte of UTF-8, 256 in all."""

    vocab_size = 256

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, ids: Sequence[int]) -> str:
        """The text; bytes that are no UTF-8 come out as U+FFFD."""
        return bytes(ids).decode(errors="replace")
