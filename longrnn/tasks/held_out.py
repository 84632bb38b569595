"""Divides documents into those to train on and those that are held out.

The division depends on the lengths of the documents alone: whole documents in a random order, the
same for every seed, until they have `SHARE` of all tokens. Where documents are so long that these
would be fewer than `SEVERAL`, the ends of the longest documents are held out instead.
"""

from __future__ import annotations

import hashlib
from typing import Any

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
# Fewer held-out documents say little about other documents.
SEVERAL = 5


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
        lengths = whole.lengths
        trained = divide(lengths, may_cut=not getattr(whole, "scored_tokens", 0))
        self._held_out = np.flatnonzero(trained < lengths)
        sizes = trained if part == TRAINING else lengths - trained
        self._documents = np.flatnonzero(sizes)
        self._starts = (trained if part == HELD_OUT else np.zeros_like(lengths))[self._documents]
        self.lengths: NDArray[np.int64] = sizes[self._documents]
        self.sha256 = hashlib.sha256(f"{whole.sha256}/{part}".encode()).hexdigest()

    def read(self, document: int, start: int, stop: int) -> Tensor:
        """Tokens `start` up to `stop` of a document, `(stop − start,)` int64."""
        first = int(self._starts[document])
        return self._whole.read(int(self._documents[document]), first + start, first + stop)

    def read_scored(self, document: int, start: int, stop: int) -> Tensor:
        """Which of the tokens `start` up to `stop` of a document belong to answers, bool."""
        return self._whole.read_scored(int(self._documents[document]), start, stop)

    @property
    def scored_tokens(self) -> int:
        """Tokens of answers."""
        held_out = sum(
            int(self._whole.read_scored(int(one), 0, int(self._whole.lengths[one])).sum())
            for one in self._held_out
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


def divide(lengths: NDArray[np.int64], *, may_cut: bool) -> NDArray[np.int64]:
    """Returns how many tokens of each document are trained on; those after them are held out.

    Args:
        lengths: `(documents,)`, in tokens.
        may_cut: whether a document may be divided.

    Raises:
        UserError: there are too few documents.
    """
    total, trained = int(lengths.sum()), lengths.copy()
    wanted, taken, chosen = min(SHARE * total, MOST), 0, 0
    for index in shuffled(len(lengths), "held out").tolist():
        if taken >= wanted and (may_cut or chosen >= SEVERAL):
            break
        if taken + int(lengths[index]) <= LARGEST * total:
            trained[index] = 0
            taken, chosen = taken + int(lengths[index]), chosen + 1
    if may_cut and chosen < SEVERAL and (ends := _ends(lengths, int(wanted))).any():
        trained = lengths - ends
    if (trained == lengths).all():
        raise UserError(
            f"the data has {len(lengths):,} documents with {total:,} tokens, too few to hold some "
            "out: give more of them, or validation data of its own"
        )
    return trained


def _ends(lengths: NDArray[np.int64], wanted: int) -> NDArray[np.int64]:
    """How many tokens at the end of each document are held out, about `wanted` in all.

    The longest documents give an equal share each: those that have half of all tokens, but at least
    `SEVERAL`.
    """
    order = np.argsort(-lengths, kind="stable")
    sums = lengths[order].cumsum()
    count = max(SEVERAL, int(np.searchsorted(sums, sums[-1] / 2)) + 1)
    longest = order[:count]
    ends = np.zeros_like(lengths)
    ends[longest] = lengths[longest] * (wanted / int(lengths[longest].sum()))
    return np.where((ends < 2) | (lengths - ends < 2), 0, ends)
