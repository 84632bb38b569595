"""Language modelling: the next token of a text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from longrnn.corpus import HEADER, Corpus
from longrnn.errors import LengthError, UserError
from longrnn.tasks.base import TASKS, Batch, Task, row_starts
from longrnn.tasks.documents import Documents, Rows, Texts, packed
from longrnn.tasks.held_out import part_of
from longrnn.tasks.packed_streams import PackedStreams
from longrnn.tasks.streams import Streams
from longrnn.text import ByteTokenizer, Tokenizer
from longrnn.units import TokenCount


@TASKS.register("text")
class Text(Task):
    """Predict the next token of a text at every token.

    With the text `to be` and length 4, one byte per token:

        tokens   t o   b
        targets  o   b e

    Independent rows start at places drawn uniformly from all documents. Rows that are streams read
    documents from their start, see `longrnn.tasks.streams`. Held-out text is text in other files.

    Without packing, no row crosses the end of a document, and documents shorter than a row are left
    out. With packing, documents of any length follow each other in a row, each from the zero state:
    `Batch.is_document_start` is true at their first tokens. The last token of a document is
    predicted and predicts nothing.

    Args:
        tokenizer: makes the ids of the text; bytes by default.
        data: what to train on: a corpus of `longrnn data build`, or a file, a folder, a dataset or
            a list of them, which training tokenizes (`longrnn.training.sources`).
        files: UTF-8 text files to train on, one document each, tokenized in memory when training
            starts. A folder stands for the text files in it.
        corpus: a folder that `longrnn data build` wrote.
        part: `all` documents; or `training` and `held_out`, which divide them
            (`longrnn.tasks.held_out`).
        packing: whether documents share rows; by default they do with `data` only.
        max_segments: the largest number of segments of a document; longer ones are cut. No limit
            by default.
        text_column: of tables: the column with the text.
        split: of datasets: the split to train on.
        subset: of datasets: the configuration, for those that have several.
        revision: of datasets on the Hub: a branch, tag or commit.
        split_on: text that separates documents inside a file; by default a file is a document.
        append_eos: whether each document ends with the tokenizer's end-of-sequence token.
        max_tokens: stop reading `data` after the document that reaches this many tokens.
    """

    default_length = 256

    def __init__(
        self,
        tokenizer: Tokenizer | None = None,
        *,
        data: Any = None,
        files: list[str] | None = None,
        corpus: str | None = None,
        part: str = "all",
        packing: bool | None = None,
        max_segments: int | None = None,
        text_column: str = "text",
        split: str = "train",
        subset: str | None = None,
        revision: str | None = None,
        split_on: str | None = None,
        append_eos: bool = False,
        max_tokens: TokenCount | None = None,
    ) -> None:
        if [bool(files), corpus is not None, data is not None].count(True) != 1:
            raise UserError(
                "the text task needs one source: set either files (a list of UTF-8 text files to "
                "train on), or corpus (a folder that `longrnn data build` wrote), or data (files, "
                "folders or datasets to tokenize)"
            )
        if max_segments is not None and max_segments < 1:
            raise UserError(
                f"max_segments must be at least 1, not {max_segments}: set a positive number"
            )
        tokenizer = tokenizer or ByteTokenizer()
        self.vocab_size, self.max_segments = tokenizer.vocab_size, max_segments
        self.packing = self.derived_options({"data": data, "packing": packing})["packing"]
        whole = Texts(files, tokenizer) if files else open_corpus(corpus, data, tokenizer)
        self.documents: Documents = part_of(whole, part)
        self._rows: Rows | None = None  # of packed rows, made when the first one is drawn
        self._starts: tuple[int, NDArray[np.int64], NDArray[np.int64]] | None = None
        self._streams: dict[tuple[int, int, int], Streams | PackedStreams] = {}

    @staticmethod
    def derived_options(options: Mapping[str, Any]) -> dict[str, Any]:
        """The value of `packing` where it is left out, see `Registry.complete`."""
        given = options["packing"]
        return {"packing": options["data"] is not None if given is None else given}

    def sample(self, batch_size: int, *, length: int, generator: torch.Generator) -> Batch:
        return self._draw(range(batch_size), batch_size, length, generator)

    def sample_part(self, rows: range, batch_size: int, *, length: int, seed: int) -> Batch:
        return self._draw(rows, batch_size, length, torch.Generator().manual_seed(seed))

    def segment(
        self, streams: Sequence[int], step: int, *, n_streams: int, length: int, seed: int
    ) -> Batch:
        layout = self._laid_out(n_streams, length, seed)
        if isinstance(layout, PackedStreams):
            return packed(self.documents, [layout.pieces(row, step) for row in streams], length)
        places = [layout.place(stream, step) for stream in streams]
        begins = torch.tensor([place.is_document_start for place in places])
        return self._batch([(place.document, place.start) for place in places], length, begins)

    def most_rows(self, length: int, *, seed: int, is_carried: bool) -> int | None:
        return self._laid_out(1, length, seed).documents if is_carried else None

    def layout(self, n_streams: int, *, length: int, seed: int) -> str:
        """The number of streams, the size of their epochs, and the text left out, in words."""
        streams = self._laid_out(n_streams, length, seed)
        head = f"{streams.documents:,} documents in {n_streams:,} streams, whose epochs have "
        if isinstance(streams, PackedStreams):
            return f"{head}{min(streams.epochs):,} to {max(streams.epochs):,} tokens to predict"
        share = streams.dropped_tokens / int(self.documents.lengths.sum())
        return (
            f"{head}{min(streams.epochs):,} to {max(streams.epochs):,} segments of {length:,} "
            f"tokens; left out: {streams.dropped_documents:,} documents shorter than a segment and "
            f"the ends of the others, {streams.dropped_tokens:,} tokens in all ({share:.2%})"
        )

    def left_out(self, length: int) -> str:
        short = self.documents.lengths <= length
        if self.packing or not short.any():
            return ""
        tokens = int(self.documents.lengths[short].sum())
        return (
            f"left out: {int(short.sum()):,} documents shorter than a row, {tokens:,} tokens in "
            "all; task.packing=true trains on them"
        )

    def longest_document(self, length: int) -> int:
        targets = int(self.documents.lengths.max()) - 1
        longest = -(-targets // length) if self.packing else targets // length
        return longest if self.max_segments is None else min(longest, self.max_segments)

    def score(self, predictions: Tensor, batch: Batch) -> dict[str, Tensor]:
        """`accuracy`: the share of tokens that are right."""
        return {"accuracy": (predictions == batch.targets).float().mean(dim=1)}

    def data_sha256(self) -> str:
        return self.documents.sha256

    def _draw(self, rows: range, batch_size: int, length: int, generator: torch.Generator) -> Batch:
        """Draws the places of all rows of a batch, and reads some of them."""
        if self.packing:
            self._rows = self._rows or Rows(self.documents.lengths)
            drawn = self._rows.draw(batch_size, length=length, generator=generator)
            pieces = [self._rows.pieces(drawn[row], length) for row in rows]
            batch = packed(self.documents, pieces, length)
            batch.is_document_start[:, 0] = True  # no row continues the last batch
            return batch
        starts, ends = self._places(length)
        if ends[-1] == 0:
            longest = int(self.documents.lengths.max())
            raise LengthError(
                f"no text has more than {length} tokens, the longest has {longest}: use a "
                f"length of at most {longest - 1}, or task.packing=true to fill rows with several "
                "texts"
            )
        drawn = torch.randint(int(ends[-1]), (batch_size,), generator=generator).numpy()
        drawn = drawn[rows.start : rows.stop]
        chosen = np.searchsorted(ends, drawn, side="right")
        places = drawn - (ends[chosen] - starts[chosen])
        pairs = list(zip(chosen.tolist(), places.tolist(), strict=True))
        return self._batch(pairs, length, torch.ones(len(pairs), dtype=torch.bool))

    def _places(self, length: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """How many rows of `length` tokens may start in each document, and their running sum."""
        if self._starts is None or self._starts[0] != length:
            starts = np.maximum(0, self.documents.lengths - length)
            self._starts = length, starts, np.cumsum(starts)
        return self._starts[1:]

    def _laid_out(self, n_streams: int, length: int, seed: int) -> Streams | PackedStreams:
        key = n_streams, length, seed
        if key not in self._streams:
            self._streams[key] = (PackedStreams if self.packing else Streams)(
                self.documents.lengths,
                n_streams=n_streams,
                length=length,
                max_segments=self.max_segments,
                seed=seed,
            )
        return self._streams[key]

    def _batch(self, places: Sequence[tuple[int, int]], length: int, begins: Tensor) -> Batch:
        """Rows of `length` + 1 tokens from (document, first token), shifted by one."""
        rows = [self.documents.read(which, start, start + length + 1) for which, start in places]
        tokens = torch.stack(rows)
        return Batch(tokens[:, :-1], tokens[:, 1:], row_starts(tokens[:, 1:], begins))


def open_corpus(corpus: str | None, data: Any, tokenizer: Tokenizer) -> Corpus:
    """The corpus in the folder `corpus`, or in `data` where that is one.

    Raises:
        UserError: there is none, or it was made with another tokenizer.
    """
    if corpus is None:
        if not (isinstance(data, str) and (Path(data) / HEADER).is_file()):
            raise UserError(
                f"data={data!r} is not a corpus and this command does not tokenize: run `longrnn "
                "data build` on it and give the folder that it wrote as corpus"
            )
        corpus = data
    opened = Corpus(Path(corpus))
    opened.check_tokenizer(tokenizer)
    return opened
