"""Documents of token ids, in memory or in a corpus, and the rows of a batch that they fill."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from longrnn.errors import LengthError, UserError
from longrnn.tasks.base import UNSCORED, Batch
from longrnn.tasks.packed_streams import Piece
from longrnn.text import TEXT_SUFFIXES, Tokenizer, files_below, read_text


class Documents(Protocol):
    """Token ids of documents.

    Attributes:
        lengths: `(documents,)` int64.
        sha256: hash of all documents.
    """

    lengths: NDArray[np.int64]
    sha256: str

    def read(self, document: int, start: int, stop: int) -> Tensor:
        """Tokens `start` up to `stop` of a document, `(stop − start,)` int64."""
        ...


class Texts:
    """Documents in memory: text files, one document each; a folder stands for those in it.

    Raises:
        UserError: a file that cannot be read, or a folder without text files.
    """

    def __init__(self, files: Sequence[str], tokenizer: Tokenizer) -> None:
        paths = [path for file in files for path in _files(Path(file))]
        self.texts = [
            torch.tensor(tokenizer.encode(read_text(path)[0]), dtype=torch.int32) for path in paths
        ]
        self.lengths = np.array([len(text) for text in self.texts], dtype=np.int64)
        digest = hashlib.sha256(self.lengths.tobytes())
        for text in self.texts:
            digest.update(text.numpy().tobytes())
        self.sha256 = digest.hexdigest()

    def read(self, document: int, start: int, stop: int) -> Tensor:
        return self.texts[document][start:stop].long()


def _files(path: Path) -> list[Path]:
    if not path.is_dir():
        return [path]
    if not (found := files_below(path)):
        raise UserError(
            f"no text file in {path} ({', '.join(TEXT_SUFFIXES)}): name the files, or give other "
            "data as task.data"
        )
    return found


class Rows:
    """Places of documents laid end to end, from which packed rows are drawn.

    A document of n tokens has n − 1 places, each of which predicts the next token of it.

    Args:
        lengths: tokens of every document.
    """

    def __init__(self, lengths: NDArray[np.int64]) -> None:
        self._ends = np.cumsum(lengths - 1)
        self.places = int(self._ends[-1])

    def draw(self, batch_size: int, *, length: int, generator: torch.Generator) -> list[int]:
        """Where the rows of a batch start: places drawn uniformly.

        Raises:
            LengthError: all documents together are shorter than a row.
        """
        if self.places < length:
            raise LengthError(
                f"all texts together have {self.places:,} tokens to predict and a row has "
                f"{length:,}: use a length of at most {max(1, self.places):,}, or give more text"
            )
        return torch.randint(self.places, (batch_size,), generator=generator).tolist()

    def pieces(self, place: int, length: int) -> list[Piece]:
        """The documents of a row from `place` on; the first one follows the last one."""
        pieces: list[Piece] = []
        document = int(np.searchsorted(self._ends, place, side="right"))
        while length:
            end = int(self._ends[document])
            begin = int(self._ends[document - 1]) if document else 0
            size = min(end - place, length)
            if size:
                pieces.append(Piece(document, place - begin, size, place == begin))
            length, place, document = length - size, place + size, document + 1
            if document == len(self._ends):
                place = document = 0
        return pieces


def packed(
    documents: Documents,
    rows: Sequence[Sequence[Piece]],
    width: int,
    *,
    read_scored: Callable[[int, int, int], Tensor] | None = None,
) -> Batch:
    """The batch of rows of documents.

    The last token of a document is a target and never an input, so that no target crosses the end
    of a document.

    Args:
        documents: the documents.
        rows: their pieces, at most `width` tokens in each row; what is missing is padded.
        width: tokens of a row.
        read_scored: as `Documents.read`, which tokens are targets; None for all.
    """
    tokens = torch.zeros(len(rows), width, dtype=torch.long)
    targets = torch.full_like(tokens, UNSCORED)
    starts = torch.zeros(tokens.shape, dtype=torch.bool)
    for row, pieces in enumerate(rows):
        place = 0
        for piece in pieces:
            end = place + piece.size
            ids = documents.read(piece.document, piece.start, piece.start + piece.size + 1)
            tokens[row, place:end], wanted = ids[:-1], ids[1:]
            if read_scored is not None:
                first, last = piece.start + 1, piece.start + piece.size + 1
                wanted = wanted.where(read_scored(piece.document, first, last), UNSCORED)
            targets[row, place:end] = wanted
            starts[row, place] = piece.is_document_start
            place = end
    used = torch.tensor([sum(piece.size for piece in pieces) for pieces in rows])
    is_token = torch.arange(width) < used[:, None]
    return Batch(tokens, targets, starts, is_token=None if bool(is_token.all()) else is_token)
