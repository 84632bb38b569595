"""Language modelling: the next token of a text."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from longrnn.corpus import Corpus
from longrnn.errors import UserError
from longrnn.tasks.base import TASKS, Batch, Task
from longrnn.tasks.streams import Streams
from longrnn.text import ByteTokenizer, Tokenizer, read_text


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
    """Documents in memory: text files, one document each."""

    def __init__(self, files: Sequence[str], tokenizer: Tokenizer) -> None:
        self.texts = [
            torch.tensor(tokenizer.encode(read_text(Path(file))[0]), dtype=torch.int32)
            for file in files
        ]
        self.lengths = np.array([len(text) for text in self.texts], dtype=np.int64)
        digest = hashlib.sha256(self.lengths.tobytes())
        for text in self.texts:
            digest.update(text.numpy().tobytes())
        self.sha256 = digest.hexdigest()

    def read(self, document: int, start: int, stop: int) -> Tensor:
        return self.texts[document][start:stop].long()


@TASKS.register("text")
class Text(Task):
    """Predict the next token of a text at every token.

    With the text `to be` and length 4, one byte per token:

        tokens   t o   b
        targets  o   b e

    Independent rows start at places drawn uniformly from all documents. Rows that are streams read
    documents from their start, see `longrnn.tasks.streams`. No row crosses the end of a document.
    Held-out text is text in other files.

    Args:
        tokenizer: makes the ids of the text; bytes by default.
        files: UTF-8 text files to train on, one document each, tokenized when training starts.
        corpus: instead of files, a folder that `longrnn data build` wrote.
        max_segments: the largest number of segments of a document; longer ones are cut. No limit
            by default.
    """

    default_length = 256

    def __init__(
        self,
        tokenizer: Tokenizer | None = None,
        *,
        files: list[str] | None = None,
        corpus: str | None = None,
        max_segments: int | None = None,
    ) -> None:
        if bool(files) == (corpus is not None):
            raise UserError(
                "the text task needs one source: set either files (a list of UTF-8 text files to "
                "train on) or corpus (a folder that `longrnn data build` wrote)"
            )
        if max_segments is not None and max_segments < 1:
            raise UserError(
                f"max_segments must be at least 1, not {max_segments}: set a positive number"
            )
        tokenizer = tokenizer or ByteTokenizer()
        self.vocab_size, self.max_segments = tokenizer.vocab_size, max_segments
        self.documents: Documents
        if corpus is None:
            self.documents = Texts(files or [], tokenizer)
        else:
            self.documents = opened = Corpus(Path(corpus))
            opened.check_tokenizer(tokenizer)
        self._streams: dict[tuple[int, int, int], Streams] = {}

    def sample(self, batch_size: int, *, length: int, generator: torch.Generator) -> Batch:
        starts = np.maximum(0, self.documents.lengths - length)  # places of each document
        ends = np.cumsum(starts)
        if ends[-1] == 0:
            longest = int(self.documents.lengths.max())
            raise UserError(
                f"no text has more than {length} tokens, the longest has {longest}: use a "
                f"length of at most {longest - 1}"
            )
        drawn = torch.randint(int(ends[-1]), (batch_size,), generator=generator).numpy()
        chosen = np.searchsorted(ends, drawn, side="right")
        places = drawn - (ends[chosen] - starts[chosen])
        pairs = zip(chosen.tolist(), places.tolist(), strict=True)
        return self._batch(list(pairs), length, torch.ones(batch_size, dtype=torch.bool))

    def segment(
        self, streams: Sequence[int], step: int, *, n_streams: int, length: int, seed: int
    ) -> Batch:
        layout = self._laid_out(n_streams, length, seed)
        places = [layout.place(stream, step) for stream in streams]
        is_document_start = torch.tensor([place.is_document_start for place in places])
        return self._batch(
            [(place.document, place.start) for place in places], length, is_document_start
        )

    def layout(self, n_streams: int, *, length: int, seed: int) -> str:
        """The number of streams, the size of their epochs, and the text left out, in words."""
        streams = self._laid_out(n_streams, length, seed)
        share = streams.dropped_tokens / int(self.documents.lengths.sum())
        return (
            f"{streams.documents:,} documents in {n_streams:,} streams, whose epochs have "
            f"{min(streams.epochs):,} to {max(streams.epochs):,} segments of {length:,} tokens; "
            f"left out: {streams.dropped_documents:,} documents shorter than a segment and the "
            f"ends of the others, {streams.dropped_tokens:,} tokens in all ({share:.2%})"
        )

    def longest_document(self, length: int) -> int:
        longest = int(self.documents.lengths.max() - 1) // length
        return longest if self.max_segments is None else min(longest, self.max_segments)

    def score(self, predictions: Tensor, batch: Batch) -> dict[str, Tensor]:
        """`accuracy`: the share of tokens that are right."""
        return {"accuracy": (predictions == batch.targets).float().mean(dim=1)}

    def data_sha256(self) -> str:
        return self.documents.sha256

    def _laid_out(self, n_streams: int, length: int, seed: int) -> Streams:
        key = n_streams, length, seed
        if key not in self._streams:
            self._streams[key] = Streams(
                self.documents.lengths,
                n_streams=n_streams,
                length=length,
                max_segments=self.max_segments,
                seed=seed,
            )
        return self._streams[key]

    def _batch(
        self, places: Sequence[tuple[int, int]], length: int, is_document_start: Tensor
    ) -> Batch:
        """Rows of `length` + 1 tokens from (document, first token), shifted by one."""
        rows = [self.documents.read(which, start, start + length + 1) for which, start in places]
        tokens = torch.stack(rows)
        return Batch(tokens[:, :-1], tokens[:, 1:], is_document_start)
