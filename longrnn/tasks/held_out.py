"""Divides documents into those to train on and those that are held out.

The division depends on the lengths of the documents alone: whole documents in a random order, the
same for every seed, until they have `SHARE` of all tokens. Where documents are so few that each has
too many tokens for that, the end of the longest one is held out.
"""

from __future__ import annotations

import hashlib
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from longrnn.errors import UserError, nearest
from longrnn.tasks.streams import shuffled

ALL, TRAINING, HELD_OUT = PARTS = ("all", "training", "held_out")
# Held out: this share of all tokens, but no more than so many tokens.
SHARE, MOST = 0.05, 2**22
# No document is held out that would bring the share above this.
LARGEST = 0.25


class Division(NamedTuple):
    """What is held out: `documents` as a whole, or the tokens of one document from `cut` on."""

    documents: NDArray[np.int64]
    cut: int | None = None


class Portion:
    """One part of documents, with the interface of `longrnn.tasks.documents.Documents`.

    Args:
        whole: all documents; where it has answers, a document is never cut.
        part: `training` or `held_out`.

    Attributes:
        lengths: `(documents,)` int64.
        sha256: hash of this part.

    Raises:
        UserError: there are too few documents.
    """

    def __init__(self, whole: Any, part: str) -> None:
        self._whole, self._part = whole, part
        self._division = divide(whole.lengths, may_cut=not getattr(whole, "scored_tokens", 0))
        documents, cut = self._division
        is_held_out = np.zeros(len(whole.lengths), dtype=bool)
        is_held_out[documents] = True
        self._start = 0
        lengths = whole.lengths.copy()
        if cut is None:
            self._documents = np.flatnonzero(is_held_out == (part == HELD_OUT))
        elif part == HELD_OUT:
            self._documents, self._start = documents, cut
            lengths[documents] -= cut
        else:
            self._documents = np.arange(len(lengths))
            lengths[documents] = cut
        self.lengths: NDArray[np.int64] = lengths[self._documents]
        self.sha256 = hashlib.sha256(f"{whole.sha256}/{part}".encode()).hexdigest()

    def read(self, document: int, start: int, stop: int) -> Tensor:
        """Tokens `start` up to `stop` of a document, `(stop − start,)` int64."""
        first = self._start
        return self._whole.read(int(self._documents[document]), first + start, first + stop)

    def read_scored(self, document: int, start: int, stop: int) -> Tensor:
        """Which of the tokens `start` up to `stop` of a document belong to answers, bool."""
        return self._whole.read_scored(int(self._documents[document]), start, stop)

    @property
    def scored_tokens(self) -> int:
        """Tokens of answers."""
        held_out = sum(
            int(self._whole.read_scored(int(one), 0, int(self._whole.lengths[one])).sum())
            for one in self._division.documents
        )
        return held_out if self._part == HELD_OUT else self._whole.scored_tokens - held_out


def part_of(documents: Any, part: str) -> Any:
    """All documents, or a `Portion` of them.

    Raises:
        UserError: an unknown part, or too few documents.
    """
    if part not in PARTS:
        raise UserError(f"part={part!r} is not a part of the data: {nearest(part, PARTS)}")
    return documents if part == ALL else Portion(documents, part)


def divide(lengths: NDArray[np.int64], *, may_cut: bool) -> Division:
    """Returns what is held out of documents of these lengths.

    Args:
        lengths: `(documents,)`, in tokens.
        may_cut: whether a document may be divided.

    Raises:
        UserError: there are too few documents.
    """
    total = int(lengths.sum())
    wanted, taken = min(SHARE * total, MOST), 0
    chosen: list[int] = []
    for index in shuffled(len(lengths), "held out").tolist():
        if taken >= wanted:
            break
        if taken + int(lengths[index]) <= LARGEST * total:
            chosen.append(index)
            taken += int(lengths[index])
    if chosen:
        return Division(np.array(sorted(chosen), dtype=np.int64))
    longest = int(lengths.argmax())
    cut = int(lengths[longest]) - int(wanted)
    if not may_cut or wanted < 2 or cut < 2:
        raise UserError(
            f"the data has {len(lengths):,} documents with {total:,} tokens, too few to hold some "
            "out: give more of them, or validation data of its own"
        )
    return Division(np.array([longest], dtype=np.int64), cut)
