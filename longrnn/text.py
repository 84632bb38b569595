"""Tokenizers, of which the byte-level one needs no file, and how documents are made of data."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Protocol

from pydantic import BeforeValidator, Field

from longrnn.bundled import text_path
from longrnn.errors import UserError
from longrnn.options import Options, Tokens

# What holds documents: files, folders, datasets and corpora, or a bundled text by its name.
Documents = Annotated[str, BeforeValidator(lambda name: str(text_path(name)))]


class Tokenizer(Protocol):
    """Text to ids and back. No special tokens are added.

    Attributes:
        vocab_size: number of ids.
        bos_id: the id that the tokenizer puts in front of a text (BOS); None if it adds none.
        eos_id: the id that ends a text; None for a tokenizer without such an id.
    """

    vocab_size: int
    bos_id: int | None
    eos_id: int | None

    def encode(self, text: str) -> list[int]:
        """The ids of a text."""
        ...

    def encode_many(self, texts: Sequence[str]) -> list[list[int]]:
        """`encode` of several texts, on all cores where the tokenizer can use them."""
        ...

    def encode_chat(self, messages: Sequence[Mapping[str, Any]]) -> tuple[list[int], list[bool]]:
        """The ids of a conversation, and which of them the assistant wrote.

        Args:
            messages: `{"role": …, "content": …}`, in their order.

        Raises:
            ValueError: the chat template is missing or fails; the message says why.
        """
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids."""
        ...

    def encode_with_ends(self, text: str) -> tuple[Sequence[int], Sequence[int] | None]:
        """The ids of a text, and where each token ends, in bytes of UTF-8 from its start.

        Bytes without a token count to the next token, or to the last token. The ends are None if
        the tokenizer does not report them.
        """
        ...

    def fingerprint(self) -> str:
        """A short text: two tokenizers with equal fingerprints give every text the same ids."""
        ...


def with_bos(ids: list[int], tokenizer: Tokenizer) -> list[int]:
    """The ids of what is read from an empty state: with BOS in front if the tokenizer adds it."""
    bos = tokenizer.bos_id
    return ids if bos is None or ids[:1] == [bos] else [bos, *ids]


def utf8(text: str) -> bytes:
    """The bytes of a text.

    Raises:
        UserError: it comes from bytes that are not UTF-8, as on a command line, and has none.
    """
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise UserError(f"{text!r} is not UTF-8 text: set the terminal to UTF-8") from error


class ByteTokenizer:
    """One id per byte of UTF-8, 256 in all."""

    vocab_size = 256
    bos_id: int | None = None
    eos_id: int | None = None

    def encode(self, text: str) -> list[int]:
        return list(utf8(text))

    def encode_many(self, texts: Sequence[str]) -> list[list[int]]:
        return [self.encode(text) for text in texts]

    def encode_chat(self, messages: Sequence[Mapping[str, Any]]) -> tuple[list[int], list[bool]]:
        raise UserError(
            "the byte tokenizer has no chat template: give prompt and completion instead of "
            "messages, or the tokenizer of a chat model"
        )

    def decode(self, ids: Sequence[int]) -> str:
        """The text, with U+FFFD for bytes that are not UTF-8 and for ids that are not bytes."""
        # A model may have more ids than its tokenizer. No text has the byte 0xFF.
        return bytes(index if index < 256 else 0xFF for index in ids).decode(errors="replace")

    def encode_with_ends(self, text: str) -> tuple[Sequence[int], Sequence[int] | None]:
        ids = utf8(text)
        return ids, range(1, len(ids) + 1)

    def fingerprint(self) -> str:
        return "bytes"


class Reading(Options):
    """How documents are made of data."""

    instruct: bool = False
    """Read rows with prompt and completion, or messages, for the task instruct."""
    text_column: str = "text"
    """Column of a table that holds the text."""
    split: str = "train"
    """Split of a dataset."""
    subset: str | None = None
    """Configuration of a dataset that has several."""
    split_on: str | None = Field(default=None, min_length=1)
    """Text that separates documents inside a file, such as '<|endoftext|>' (default: one document
    per file, or per row of a table)."""
    append_eos: bool = False
    """End each document with the end-of-sequence token, as answers always do."""
    min_length: Tokens = 2
    """Drop documents with fewer tokens than this."""
    max_tokens: Tokens | None = None
    """Stop after the document that reaches this many tokens."""
