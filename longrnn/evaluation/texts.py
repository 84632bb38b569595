"""Texts of evaluations: reading, tokenizing, and tokens of several models that end at one byte."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from longrnn.errors import UserError
from longrnn.hf.opened import refuse_unfit
from longrnn.models import LanguageModel
from longrnn.text import Tokenizer, read_text

logger = logging.getLogger(__name__)


class Document(NamedTuple):
    """A tokenized text.

    Attributes:
        name: name of its file.
        sha256: SHA-256 of its bytes, hexadecimal.
        tokens: `(n,)` int64.
        byte_ends: `(n,)` int64, the byte at which each token ends; None if the tokenizer has no
            offsets.
    """

    name: str
    sha256: str
    tokens: Tensor
    byte_ends: Tensor | None = None


def read_documents(
    paths: Sequence[Path], tokenizer: Tokenizer, model: LanguageModel
) -> list[Document]:
    """Read text files, one document per file.

    Raises:
        UserError: a file is missing, empty or not text, a text is given twice, or the tokenizer
            has more ids than the model.
    """
    refuse_unfit(tokenizer, model)
    documents: dict[str, Document] = {}
    for path in paths:
        text, digest = read_text(path)
        if digest in documents:
            raise UserError(f"{path} and {documents[digest].name} are the same text: give it once")
        documents[digest] = tokenised(path.name, digest, text, tokenizer)
    return list(documents.values())


def tokenised(name: str, sha256: str, text: str, tokenizer: Tokenizer) -> Document:
    """Tokenize a text."""
    ends = tokenizer.byte_ends(text)
    return Document(
        name, sha256, _integers(tokenizer.encode(text)), None if ends is None else _integers(ends)
    )


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
    return Document("newlines", hashlib.sha256(b"\n").hexdigest(), tokens, ends)


def warn_if_calibrated_on(model: LanguageModel, names: Mapping[str, str]) -> None:
    """Warn of every text that the model's mitigation was calibrated on.

    Args:
        model: any model.
        names: names of texts by their SHA-256.
    """
    parts = () if model.mitigation is None else model.mitigation.parts()
    used = {digest for part in parts if part.calibration for digest in part.calibration.text_sha256}
    for digest in used & names.keys():
        logger.warning(
            f"the mitigation was calibrated on {names[digest]}: measure it on another text"
        )


def are_alike(documents: Sequence[Document]) -> bool:
    """Return whether a text has the same tokens for every model."""
    return all(torch.equal(one.tokens, documents[0].tokens) for one in documents)


def shared_places(texts: Sequence[Document], places: Sequence[int]) -> list[list[int]]:
    """Return tokens of several tokenizers that end at the same bytes of one text.

    Args:
        texts: the text, tokenized for each model.
        places: indices of tokens of the first model, ascending.

    Returns:
        For each model the index of a token for each of `places`: the token that ends at the last
        byte that is a token border of all tokenizers and not after the end of the first model's
        token. If all models have the same tokens, these are `places`.

    Raises:
        UserError: the byte offsets of a tokenizer are not known, or there are too few common
            borders.
    """
    if are_alike(texts):
        return [list(places) for _ in texts]
    ends = [text.byte_ends for text in texts if text.byte_ends is not None]
    if len(ends) < len(texts):
        raise UserError(
            f"models with different tokenizers are compared by the bytes of {texts[0].name}, "
            "and one of the tokenizers has no byte offsets: measure these models one by one"
        )
    common = ends[0]
    for end in ends[1:]:
        common = common[torch.isin(common, end)]
    wanted = ends[0][torch.tensor(places)]
    found = (torch.searchsorted(common, wanted, right=True) - 1).clamp(min=0)
    if not len(common) or len(found.unique()) < len(found):
        raise UserError(
            f"the tokenizers of these models have too few common token borders in {texts[0].name}: "
            "give greater --lengths"
        )
    cuts = common[found]
    # Of several tokens that end at one byte, take the last.
    return [(torch.searchsorted(end, cuts, right=True) - 1).tolist() for end in ends]


def _integers(values: Sequence[int]) -> Tensor:
    """Return `(n,)` int64, without turning a range into a list, which needs five times as much."""
    return torch.from_numpy(np.fromiter(values, dtype=np.int64, count=len(values)))
