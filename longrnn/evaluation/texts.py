"""Texts of evaluations, and windows of them that end at the same bytes for all models."""

import hashlib
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from longrnn.checkpoints.opened import refuse_unfit
from longrnn.errors import UserError
from longrnn.files import read_text
from longrnn.models import LanguageModel
from longrnn.text import Tokenizer
from longrnn.units import format_length

logger = logging.getLogger(__name__)
TEXT_REMEDY = "give a file of UTF-8 text, or one such as bundled:moby_dick"


class Document(NamedTuple):
    """A tokenized text.

    Attributes:
        name: name of its file.
        sha256: SHA-256 of its bytes, hexadecimal.
        tokens: `(n,)` int64.
        byte_ends: `(n,)` int64, the byte at which each token ends; None if the tokenizer has no
            offsets.
        bos_id: with which the tokenizer begins a text, see `begun`.
    """

    name: str
    sha256: str
    tokens: Tensor
    byte_ends: Tensor | None = None
    bos_id: int | None = None


class Window(NamedTuple):
    """Tokens of a text that are read from an empty state.

    Attributes:
        document: the text.
        number: which window of it, the same for all models.
        ends: index of the token at each position of the window, ascending. Positions count tokens
            of the first model, from 0. The last token is only predicted.
    """

    document: Document
    number: int
    ends: dict[int, int]

    @property
    def name(self) -> str:
        """Its name, the same for all models."""
        return f"{self.document.sha256[:16]}/{self.number}"

    @property
    def edges(self) -> list[int]:
        """The positions, counted in tokens of its own model."""
        return [end - self.ends[0] for end in self.ends.values()]

    def size(self, position: int) -> int:
        """Return the tokens of its own model up to a position."""
        return self.ends[position] - self.ends[0]

    def bytes_between(self, start: int, stop: int) -> int:
        """Return the bytes of the tokens between two positions."""
        assert self.document.byte_ends is not None
        first, last = self.document.byte_ends[[self.ends[start], self.ends[stop]]].tolist()
        return last - first

    def tokens(self) -> Tensor:
        """Return the tokens, `(length + 1,)`, of which the first is BOS if the tokenizer has it."""
        tokens = self.document.tokens[self.ends[0] :][: self.edges[-1] + 1]
        return begun(tokens, self.document.bos_id)


def read_documents(
    paths: Sequence[Path], tokenizer: Tokenizer, model: LanguageModel, newlines: int = 0
) -> list[Document]:
    """Read text files, one document per file; warn of those the model was calibrated on.

    Args:
        paths: of the files.
        tokenizer: of the model.
        model: that reads them.
        newlines: of a further document, see `newlines_only`; 0 for none.

    Raises:
        UserError: no document is given, a file is missing, empty or not text, or the tokenizer has
            more ids than the model.
    """
    if not paths and not newlines:
        raise UserError("there is nothing to read: give --text FILE, --newlines, or both")
    refuse_unfit(tokenizer, model)
    documents = []
    for path in paths:
        text, digest = read_text(path, TEXT_REMEDY)
        warn_if_calibrated_on(path.name, digest, model)
        documents.append(_document(path.name, digest, tokenizer, *tokenizer.encode_with_ends(text)))
    return [*documents, newlines_only(tokenizer, newlines)] if newlines else documents


def _document(
    name: str, sha256: str, tokenizer: Tokenizer, ids: Sequence[int], ends: Sequence[int] | None
) -> Document:
    """A document of tokens, with BOS in front if the tokenizer adds it."""
    tokens, bos = _integers(ids), tokenizer.bos_id
    byte_ends = None if ends is None else _integers(ends)
    if bos is not None and (not len(tokens) or tokens[0] != bos):
        tokens = torch.cat([torch.tensor([bos]), tokens])
        byte_ends = None if byte_ends is None else torch.cat([torch.tensor([0]), byte_ends])
    return Document(name, sha256, tokens, byte_ends, bos)


def begun(rows: Tensor, bos_id: int | None) -> Tensor:
    """Return tokens `(…, t)` that are read from an empty state, as the tokenizer begins a text.

    BOS takes the place of the first token, which nothing predicts: what is predicted, and the
    number of tokens, are the same with and without BOS.
    """
    if bos_id is None:
        return rows
    return torch.cat([torch.full_like(rows[..., :1], bos_id), rows[..., 1:]], -1)


def newlines_only(tokenizer: Tokenizer, count: int) -> Document:
    """Return a text of `count` newlines, each of which is tokenized by itself.

    A tokenizer may have tokens for several newlines; they do not occur here, so that the model
    reads the same token over and over.

    Raises:
        UserError: the tokenizer has no newline.
    """
    ids, ends = tokenizer.encode_with_ends("\n")
    if not len(ids):
        raise UserError("the tokenizer has no newline: give a text (--text) and no newlines")
    ends = None if ends is None else [end + at for at in range(count) for end in ends]
    digest = hashlib.sha256(b"\n").hexdigest()
    return _document("newlines", digest, tokenizer, [*ids] * count, ends)


def text_of(tokens: Tensor, tokenizer: Tokenizer) -> str:
    """Return the text of tokens `(t,)` that begin as `begun` says, without BOS."""
    return tokenizer.decode(tokens[int(tokenizer.bos_id is not None) :].tolist())


def warn_if_calibrated_on(name: str, sha256: str, model: LanguageModel) -> None:
    """Warn that the mitigation of a model was calibrated on a text."""
    parts = () if model.mitigation is None else model.mitigation.parts
    records = [part.calibration for part in parts if part.calibration]
    if any(sha256 in record.text_sha256 for record in records):
        logger.warning(f"the mitigation was calibrated on {name}: measure it on another text")


def are_alike(documents: Sequence[Document]) -> bool:
    """Return whether a text has the same tokens for every model."""
    return all(torch.equal(text.tokens, documents[0].tokens) for text in documents)


def cut_windows(
    texts: Sequence[Document], positions: Sequence[int], most: int | None = None
) -> list[list[Window]]:
    """Return the windows of a text for each model.

    Args:
        texts: the text, tokenized for each model.
        positions: of a window, in tokens of the first model, ascending. The last is its length.
        most: at most this many windows, spread evenly; None for all.

    Raises:
        UserError: the text is too short, or see `shared_places`.
    """
    if are_alike(texts):  # tokenizers may still disagree on where a token inside a character ends
        texts = [texts[0]] * len(texts)
    longest, first = positions[-1], texts[0]
    count = (len(first.tokens) - 1) // longest
    if count < 1:
        raise UserError(
            f"{first.name} has {len(first.tokens):,} tokens and a window of "
            f"{format_length(longest)} needs {longest + 1:,} (the last is only predicted): "
            "give a longer text or a smaller last length"
        )
    most = min(most or count, count)
    numbers, here = [number * count // most for number in range(most)], [0, *positions]
    places = sorted({number * longest + position for number in numbers for position in here})
    windows = []
    for text, shared in zip(texts, shared_places(texts, places), strict=True):
        index = dict(zip(places, shared, strict=True))
        ends = ({at: index[number * longest + at] for at in here} for number in numbers)
        pairs = zip(numbers, ends, strict=True)
        windows.append([Window(text, number, of_window) for number, of_window in pairs])
    return windows


def shared_places(texts: Sequence[Document], places: Sequence[int]) -> list[list[int]]:
    """Return tokens of several tokenizers that end at the same bytes of one text.

    Args:
        texts: the text, tokenized for each model, with the bytes of its tokens.
        places: indices of tokens of the first model, ascending.

    Returns:
        For each model the index of a token for each of `places`: the token that ends at the last
        byte that is a token border of all tokenizers and not after the end of the first model's
        token. If all models have the same tokens, these are `places`.

    Raises:
        UserError: there are too few common borders.
    """
    if are_alike(texts):
        return [list(places) for _ in texts]
    ends = [text.byte_ends for text in texts if text.byte_ends is not None]
    common = ends[0]
    for end in ends[1:]:
        common = common[torch.isin(common, end)]
    wanted = ends[0][torch.tensor(places)]
    borders = (torch.searchsorted(common, wanted, right=True) - 1).clamp(min=0)
    if not len(common) or len(borders.unique()) < len(borders):
        raise UserError(
            f"the tokenizers of these models have too few common token borders in {texts[0].name}: "
            "give greater --lengths"
        )
    cuts = common[borders]
    # Of several tokens that end at one byte, take the last.
    return [(torch.searchsorted(end, cuts, right=True) - 1).tolist() for end in ends]


def _integers(values: Sequence[int]) -> Tensor:
    """Return `(n,)` int64, without turning a range into a list, which needs five times as much."""
    return torch.from_numpy(np.fromiter(values, dtype=np.int64, count=len(values)))
