"""Texts to measure on: read, hashed and tokenised."""

from __future__ import annotations

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
    """One text.

    Attributes:
        name: of its file.
        sha256: of its bytes, hexadecimal.
        tokens: `(n,)` int64.
        byte_ends: `(n,)` int64, where each token ends; None where the tokenizer cannot tell.
        tokenizer: fingerprint of the one that made the tokens; empty for tokens of no text.
    """

    name: str
    sha256: str
    tokens: Tensor
    byte_ends: Tensor | None = None
    tokenizer: str = ""


def read_documents(
    paths: Sequence[Path], tokenizer: Tokenizer, model: LanguageModel
) -> list[Document]:
    """Reads text files, one document each.

    Args:
        paths: of UTF-8 files.
        tokenizer: that of the model.
        model: which will read the tokens.

    Raises:
        UserError: a file that is missing, empty or no text, the same text twice, or a tokenizer
            with more ids than the model.
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
    """A text, or a part of one, as a tokenizer reads it."""
    tokens, ends = _integers(tokenizer.encode(text)), tokenizer.byte_ends(text)
    ends = None if ends is None else _integers(ends)
    return Document(name, sha256, tokens, ends, tokenizer.fingerprint())


def made_by(documents: Iterable[Document]) -> str:
    """The fingerprint of the tokenizer of documents, for the header of results."""
    return ", ".join(sorted({document.tokenizer for document in documents}))


def _integers(values: Sequence[int]) -> Tensor:
    """`(n,)` int64; a range is never spelled out, which takes five times the room."""
    return torch.from_numpy(np.fromiter(values, dtype=np.int64, count=len(values)))
