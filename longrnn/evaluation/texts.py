"""Reads, hashes and tokenizes evaluation texts."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from longrnn.errors import UserError
from longrnn.models import LanguageModel
from longrnn.text import Tokenizer, read_text


class Document(NamedTuple):
    """A tokenized text.

    Attributes:
        name: name of its file.
        sha256: SHA-256 of its bytes, hexadecimal.
        tokens: `(n,)` int64.
        byte_ends: `(n,)` int64, the byte at which each token ends; None if the tokenizer has no
            offsets.
        tokenizer: fingerprint of the tokenizer; empty for tokens that are not from a text.
    """

    name: str
    sha256: str
    tokens: Tensor
    byte_ends: Tensor | None = None
    tokenizer: str = ""


def read_documents(
    paths: Sequence[Path], tokenizer: Tokenizer, model: LanguageModel
) -> list[Document]:
    """Read text files, one document per file.

    Args:
        paths: UTF-8 files.
        tokenizer: the tokenizer of the model.
        model: the model that is evaluated.

    Raises:
        UserError: a file is missing, empty or not text, a text is given twice, or the tokenizer
            has more ids than the model.
    """
    if tokenizer.vocab_size > model.vocab_size:
        raise UserError(
            f"the tokenizer has {tokenizer.vocab_size} ids and the model {model.vocab_size}: "
            "use the tokenizer that the model was trained with"
        )
    documents: dict[str, Document] = {}
    for path in paths:
        text, digest = read_text(path)
        if digest in documents:
            raise UserError(f"{path} and {documents[digest].name} are the same text: give it once")
        documents[digest] = tokenised(path.name, digest, text, tokenizer)
    return list(documents.values())


def tokenised(name: str, sha256: str, text: str, tokenizer: Tokenizer) -> Document:
    """Tokenize a text or a part of one."""
    tokens, ends = _integers(tokenizer.encode(text)), tokenizer.byte_ends(text)
    ends = None if ends is None else _integers(ends)
    return Document(name, sha256, tokens, ends, tokenizer.fingerprint())


def newlines(tokenizer: Tokenizer, count: int) -> Document:
    """Return a text of `count` newlines, each of which is tokenized by itself.

    A tokenizer may have tokens for several newlines; they do not occur here, so that the model
    reads the same token over and over.

    Raises:
        UserError: the tokenizer has no newline.
    """
    ids = tokenizer.encode("\n")
    if not ids:
        raise UserError("the tokenizer has no newline: give a text (--text) and no newlines")
    tokens, ends = _integers(ids).repeat(count), tokenizer.byte_ends("\n")
    if ends is not None:
        ends = (torch.arange(count)[:, None] + _integers(ends)).flatten()
    digest = hashlib.sha256(b"\n" * count).hexdigest()
    return Document("newlines", digest, tokens, ends, tokenizer.fingerprint())


def made_by(documents: Iterable[Document]) -> str:
    """Return the fingerprints of the tokenizers of documents, for the header of results."""
    return ", ".join(sorted({document.tokenizer for document in documents}))


def _integers(values: Sequence[int]) -> Tensor:
    """Return `(n,)` int64, without turning a range into a list, which needs five times as much."""
    return torch.from_numpy(np.fromiter(values, dtype=np.int64, count=len(values)))
