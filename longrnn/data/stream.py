"""A corpus: the token ids of documents as one flat stream in a memory-mapped file.

A corpus is a folder: `tokens.bin` (the ids of all documents, one after the other, little-endian
uint16 or uint32), `documents.bin` (where each document ends, uint64), for prompts with answers
`scored.bin` (uint8, 1 for a token of an answer), `corpus.json` (tokenizer and counts), and
`checksums.json`.

Notable choices:
- Rows, carried rows and packed documents are windows of documents that are laid end to end in an
  order of their own in every epoch. A document of n tokens has n − 1 places there: each reads a
  token and predicts the next one, so no target crosses the end of a document.
- A carried row i of n reads the places from i·T/n up to (i+1)·T/n of every epoch, segment after
  segment; T is the number of all places. Every place is read exactly once per epoch.
- Held out is the tail of the documents, which are first put into a random order that never changes.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from longrnn.checksums import damage, read_checksums
from longrnn.data.batch import UNSCORED
from longrnn.errors import UserError, nearest
from longrnn.text import Tokenizer

HEADER, TOKENS, DOCUMENTS, SCORED = "corpus.json", "tokens.bin", "documents.bin", "scored.bin"
BUILD = "build it again with `longrnn data build`"
PARTS = ("all", "training", "held_out")
# Held out: this share of all tokens, but no more than so many tokens.
SHARE, MOST = 0.05, 2**22
Whole = NDArray[np.int64]


@dataclass
class Header:
    """The content of `corpus.json`.

    Attributes:
        tokenizer: its name, as given by the user.
        fingerprint: of the tokenizer, see `longrnn.text.Tokenizer`.
        vocab_size: number of ids of the tokenizer.
        identity: hash of what determined the content.
        sources: the files and datasets that the documents came from.
        scored_tokens: number of tokens of answers; None for a corpus of texts.
        documents: number of documents.
        tokens: number of tokens.
        dropped_documents: number of documents that were too short, or had nothing to learn.
        dropped_tokens: number of their tokens.
    """

    tokenizer: str
    fingerprint: str
    vocab_size: int
    identity: str
    sources: list[str]
    scored_tokens: int | None
    documents: int = 0
    tokens: int = 0
    dropped_documents: int = 0
    dropped_tokens: int = 0

    @property
    def dtype(self) -> str:
        """The dtype of `tokens.bin`."""
        return "<u2" if self.vocab_size <= 2**16 else "<u4"


class Corpus:
    """The documents of a corpus folder.

    Args:
        folder: a folder that `longrnn data build` wrote.

    Attributes:
        header: see `Header`.
        sha256: of the files with the tokens, by name.
        spans: `(documents, 2)` int64, the first token of each document and the one after its last.

    Raises:
        UserError: the folder is missing, incomplete, damaged or not a corpus.
    """

    def __init__(self, folder: Path) -> None:
        if not (folder / HEADER).is_file():
            raise UserError(
                f"no corpus at {folder} (it has no {HEADER}): make one with `longrnn data build`"
            )
        if (wrong := damage(folder)) is not None:
            raise UserError(f"{folder} is damaged ({wrong}): copy it again or {BUILD}")
        self.folder, self.header = folder, read_header(folder)
        self.sha256 = {n: s for n, s in read_checksums(folder).items() if n != HEADER}
        ends = np.fromfile(folder / DOCUMENTS, "<u8").astype(np.int64)
        self.spans = np.stack([np.concatenate([[0], ends[:-1]]), ends], axis=1)
        self.tokens = np.memmap(folder / TOKENS, self.header.dtype, mode="r")
        has_answers = self.header.scored_tokens is not None
        self.scored = np.memmap(folder / SCORED, np.uint8, mode="r") if has_answers else None

    def check_tokenizer(self, tokenizer: Tokenizer) -> None:
        """Raises UserError for a tokenizer other than the one that made this corpus."""
        if tokenizer.fingerprint() != self.header.fingerprint:
            raise UserError(
                f"{self.folder} was made with the tokenizer {self.header.tokenizer!r} "
                f"({self.header.fingerprint}) and this one is {tokenizer.fingerprint()}: set "
                f"tokenizer={self.header.tokenizer}, or {BUILD}"
            )


def digest(content: Any) -> str:
    """Hexadecimal SHA-256 of a value as JSON with sorted keys."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def read_header(folder: Path) -> Header:
    """Reads the `corpus.json` of a whole corpus."""
    return Header(**json.loads((folder / HEADER).read_text()))


class Order(NamedTuple):
    """Documents laid end to end.

    Attributes:
        ends: `(documents,)`, the place after the last one of each document.
        shift: `(documents,)`, what is added to a place for the index of its token.
    """

    ends: Whole
    shift: Whole


class Documents:
    """The documents of a corpus, or a part of them, and the rows that they fill.

    Args:
        corpus: all documents.
        part: `all`, `training` or `held_out`.
        answers: whether the tokens of answers alone are targets.

    Attributes:
        lengths: `(documents,)` int64, in tokens.
        places: number of all places.

    Raises:
        UserError: an unknown part, or too few documents.
    """

    def __init__(self, corpus: Corpus, part: str = "all", *, answers: bool = False) -> None:
        if part not in PARTS:
            raise UserError(f"part={part!r} is not a part of the data: {nearest(part, PARTS)}")
        self.corpus, self.part = corpus, part
        self._scored = corpus.scored if answers else None
        may_cut = not answers
        self._spans = corpus.spans if part == "all" else _divided(corpus.spans, part, may_cut)
        self.lengths: Whole = self._spans[:, 1] - self._spans[:, 0]
        self.places = int((self.lengths - 1).sum())
        self.sha256 = digest([corpus.sha256, part])
        self.order = lru_cache(2)(self._order)

    def first(self, document: int) -> int:
        """The index of a document's first token in the corpus."""
        return int(self._spans[document, 0])

    def read(self, document: int, start: int, stop: int) -> Tensor:
        """Tokens `start` up to `stop` of a document, `(stop − start,)` int64."""
        own = slice(self.first(document) + start, self.first(document) + stop)
        return torch.from_numpy(self.corpus.tokens[own].astype(np.int64))

    def read_scored(self, document: int, start: int, stop: int) -> Tensor:
        """Which of the tokens `start` up to `stop` of a document belong to answers, bool."""
        assert self._scored is not None
        own = slice(self.first(document) + start, self.first(document) + stop)
        return torch.from_numpy(self._scored[own] == 1)

    def answer_tokens(self) -> Whole:
        """How many targets of each document belong to answers; all where there are no answers."""
        if self._scored is None:
            return self.lengths - 1
        first = self.corpus.spans[:, 0]
        counts = np.add.reduceat(self._scored, first, dtype=np.int64)
        counts -= self._scored[first]  # nothing predicts the first token
        return counts[np.searchsorted(first, self._spans[:, 0])]

    def _order(self, seed: int | str, epoch: int) -> Order:
        order = shuffled(len(self.lengths), f"{seed}/{epoch}")
        sizes = self.lengths[order] - 1
        ends = np.cumsum(sizes)
        return Order(ends, self._spans[order, 0] - (ends - sizes))

    def locate(self, order: Order, places: Whole) -> tuple[Whole, NDArray[np.bool_]]:
        """The index of the token at each place of an order, and which begin a document."""
        document = np.searchsorted(order.ends, places, side="right")
        before = np.where(document > 0, order.ends[document - 1], 0)
        return places + order.shift[document], places == before

    def targets(self, index: Whole) -> tuple[Tensor, Tensor]:
        """The tokens at indices of the corpus, and their targets: −100 outside answers."""
        tokens, targets = (
            torch.from_numpy(self.corpus.tokens[one].astype(np.int64)) for one in (index, index + 1)
        )
        if self._scored is not None:
            targets = targets.where(torch.from_numpy(self._scored[index + 1] == 1), UNSCORED)
        return tokens, targets


def _divided(spans: Whole, part: str, may_cut: bool) -> Whole:
    """The spans of the documents to train on, or of those that are held out.

    A document at the border is divided; where it may not be cut, it belongs to the tail.

    Raises:
        UserError: there are too few tokens.
    """
    spans = spans[shuffled(len(spans), "held out")]
    lengths = spans[:, 1] - spans[:, 0]
    kept = int(lengths.sum()) - int(min(SHARE * lengths.sum(), MOST))
    ends = np.cumsum(lengths)
    border = int(np.searchsorted(ends, kept))
    head, tail = spans[: border + 1].copy(), spans[border:].copy()
    if may_cut:
        head[-1, 1] = tail[0, 0] = spans[border, 1] - (ends[border] - kept)
    else:
        head = head[:-1]
    chosen = head if part == "training" else tail
    chosen = chosen[chosen[:, 1] - chosen[:, 0] > 1]
    if not len(chosen) or not len(head):
        raise UserError(
            f"the data has {len(spans):,} documents with {int(lengths.sum()):,} tokens, too few to "
            "hold some out: give more of them, or validation data of its own"
        )
    return chosen


def shuffled(n: int, word: str) -> Whole:
    """0 up to n in an order that `word` determines, on every machine."""
    seed = np.frombuffer(hashlib.sha256(word.encode()).digest(), "<u4")
    # NumPy does not change the sequence of its legacy generator.
    return np.random.RandomState(seed).permutation(n).astype(np.int64, copy=False)
