"""A corpus: the token ids of documents as one flat stream in a memory-mapped file.

A corpus is a folder: `tokens.bin` (the ids of all documents, one after the other, little-endian
uint16 or uint32), `documents.bin` (where each document ends, uint64), for prompts with answers
`scored.bin` (uint8, 1 for a token of an answer), `corpus.json` (tokenizer and counts), and
`checksums.json`.

Notable choices:
- Rows are windows of documents that are laid end to end in a random order: in every epoch the same
  rows in a new order; for carried rows, the documents in a new order. A document of n tokens has
  n − 1 places there: each reads a token and predicts the next one, so no target crosses the end of
  a document.
- Held out is the tail of the documents, which are first put into a random order that never changes.
"""

import hashlib
import json
import os
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field
from torch import Tensor

from longrnn.checksums import CHECKSUMS, refuse_damage
from longrnn.data.batch import UNSCORED
from longrnn.errors import UserError
from longrnn.files import open_regular, read_json
from longrnn.options import Count, validated
from longrnn.units import counted

HEADER, TOKENS, DOCUMENTS, SCORED = "corpus.json", "tokens.bin", "documents.bin", "scored.bin"
Part = Literal["all", "training", "held_out"]
# Held out: this share of all tokens, but at most this many tokens.
SHARE, MOST_HELD_OUT = 0.05, 2**22
CORPUS_REMEDY = "copy it again, or build it again with `longrnn data build`"
Whole = NDArray[np.int64]
Number = Annotated[int, Field(ge=0, lt=2**63)]


@dataclass
class Header:
    """The content of `corpus.json`.

    Attributes:
        tokenizer: its name, as given by the user.
        fingerprint: of the tokenizer, see `longrnn.text.Tokenizer`.
        vocab_size: number of ids of the tokenizer.
        identity: hash of what determined the content.
        dtype: that of `tokens.bin`.
        sources: the files and datasets that the documents came from.
        scored_tokens: number of tokens of answers; None for a corpus of texts.
        documents: number of documents.
        tokens: number of tokens.
        dropped_documents: number of documents that were too short, or had nothing to learn.
    """

    tokenizer: str
    fingerprint: str
    vocab_size: Count
    identity: str
    dtype: Literal["<u2", "<u4"]  # any other could be addresses in memory
    sources: list[str]
    scored_tokens: Number | None = None
    documents: Number = 0
    tokens: Number = 0
    dropped_documents: Number = 0


class Corpus:
    """The documents of a corpus folder, or a part of them.

    Args:
        folder: a folder that `longrnn data build` wrote.
        part: `all`, `training` or `held_out`.
        remedy: what to do about a damaged folder.

    Attributes:
        header: see `Header`; it describes all documents.
        sha256: hash of the files with the tokens, and of the part.
        spans: `(documents, 2)` int64, the first token of each document and the one after its last.
        lengths: `(documents,)` int64, in tokens.
        places: number of all places.
        scored: which tokens of the folder belong to answers; None for texts.

    Raises:
        UserError: the folder is missing or damaged, or it has too few documents.
    """

    def __init__(self, folder: Path, part: Part = "all", remedy: str = CORPUS_REMEDY) -> None:
        refuse_damage(folder, remedy)
        self.remedy = remedy
        self.folder, self.part, self.header = folder, part, read_header(folder)
        digests = read_json(folder / CHECKSUMS)
        digests.pop(HEADER, None)
        self.sha256 = digest([digests, part])
        header, has_answers = self.header, self.header.scored_tokens is not None
        self.tokens = self._mapped(TOKENS, header.dtype, header.tokens)
        self.scored = self._mapped(SCORED, "u1", header.tokens) if has_answers else None
        ends = self._mapped(DOCUMENTS, "<u8", header.documents).astype(np.int64)
        ascends = ends[0] > 0 and (ends[1:] > ends[:-1]).all() and ends[-1] == header.tokens
        is_scored = self.scored is None or (
            self.scored.max() < 2 and self.scored.sum() == header.scored_tokens
        )
        if not ascends or not is_scored or self.tokens.max() >= header.vocab_size:
            raise UserError(
                f"{folder} is damaged (its tokens, documents or answers are not those that its "
                f"{HEADER} counts): {remedy}"
            )
        spans = np.stack([np.concatenate([[0], ends[:-1]]), ends], axis=1)
        self.spans = spans if part == "all" else _divided(spans, part, not has_answers)
        self.lengths: Whole = self.spans[:, 1] - self.spans[:, 0]
        self.places = int((self.lengths - 1).sum())
        if self.places < 1:
            raise UserError(
                f"no document in {folder} has two tokens, of which one predicts the other: build "
                "it again with other data or a larger --min-length"
            )
        # The first place of each document in the order that a word determines, and its first token.
        self.order = lru_cache(2)(self._order)

    def _mapped(self, name: str, dtype: str, count: int) -> NDArray[Any]:
        """The numbers of a file, mapped into memory; refuses a file of another size."""
        with open_regular(self.folder / name) as file:
            size, whole = os.fstat(file.fileno()).st_size, count * np.dtype(dtype).itemsize
            if not count or size != whole:
                raise UserError(
                    f"{self.folder / name} is damaged (it has {size:,} bytes, and {whole:,} were "
                    f"written): {self.remedy}"
                )
            return np.memmap(file, dtype, mode="r")  # type: ignore[arg-type]

    @cached_property
    def answer_tokens(self) -> int:
        """How many tokens are predicted and belong to an answer."""
        assert self.scored is not None
        return sum(int(self.scored[start + 1 : stop].sum()) for start, stop in self.spans)

    def window(self, places: Whole, word: str) -> tuple[Tensor, Tensor, Tensor]:
        """What is at places of the documents, in the order that `word` determines.

        Returns:
            Tokens, their targets, which are −100 outside answers, and which tokens begin a
            document; each in the shape of `places`.
        """
        starts, first = self.order(word)
        document = np.searchsorted(starts, places, side="right") - 1
        index = first[document] + places - starts[document]
        tokens, targets = (
            torch.from_numpy(self.tokens[at].astype(np.int64)) for at in (index, index + 1)
        )
        if self.scored is not None:
            targets = targets.where(torch.from_numpy(self.scored[index + 1] == 1), UNSCORED)
        return tokens, targets, torch.from_numpy(places == starts[document])

    def _order(self, word: str) -> tuple[Whole, Whole]:
        order = shuffled(len(self.lengths), word)
        sizes = self.lengths[order] - 1
        return np.cumsum(sizes) - sizes, self.spans[order, 0]


def digest(content: Any) -> str:
    """Hexadecimal SHA-256 of a value as JSON with sorted keys."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def read_header(folder: Path) -> Header:
    """Reads the `corpus.json` of a whole corpus.

    Raises:
        UserError: the file does not describe a corpus.
    """
    path = folder / HEADER
    return validated(Header, read_json(path), str(path))


def _divided(spans: Whole, part: Part, may_cut: bool) -> Whole:
    """The spans of the documents to train on, or of those that are held out.

    A document at the border is divided; where it may not be cut, it belongs to the tail.

    Raises:
        UserError: there are too few tokens.
    """
    spans = spans[shuffled(len(spans), "held out")]
    lengths = spans[:, 1] - spans[:, 0]
    kept = int(lengths.sum()) - int(min(SHARE * lengths.sum(), MOST_HELD_OUT))
    ends = np.cumsum(lengths)
    border = int(np.searchsorted(ends, kept))
    head, tail = spans[: border + 1].copy(), spans[border:].copy()
    cut = spans[border, 1] - (ends[border] - kept) if may_cut else spans[border, 0]
    head[-1, 1], tail[0, 0] = cut, cut
    chosen = head if part == "training" else tail
    chosen = chosen[chosen[:, 1] - chosen[:, 0] > 1]
    if not len(chosen):
        raise UserError(
            f"the data has {counted(len(spans), 'document')} with {int(lengths.sum()):,} tokens, "
            "too few to hold some out: give more of them, or validation data of its own"
        )
    return chosen


def shuffled(n: int, word: str) -> Whole:
    """0 up to n in an order that `word` determines, on every machine."""
    seed = np.frombuffer(hashlib.sha256(word.encode()).digest(), "<u4")
    # NumPy does not change the sequence of its legacy generator.
    return np.random.RandomState(seed).permutation(n).astype(np.int64, copy=False)
