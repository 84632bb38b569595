"""Prompts and answers, of which the answers alone are trained on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from longrnn.errors import UserError
from longrnn.tasks.base import TASKS, Batch, Task
from longrnn.tasks.documents import packed
from longrnn.tasks.held_out import part_of
from longrnn.tasks.packed_streams import PackedStreams, Piece, WholeDocuments
from longrnn.tasks.text import open_corpus
from longrnn.text import ByteTokenizer, Tokenizer
from longrnn.units import TokenCount


@TASKS.register("instruct")
class Instruct(Task):
    """Predict the tokens of answers; the tokens of prompts have no target.

    With the prompt `2+2=`, the completion `4` and length 4, one byte per token:

        tokens   2 + 2 =
        targets  . . . 4

    A document is a prompt with its answer, or a conversation with several. Without a carried state,
    a row holds as many whole documents as fit, each from the zero state, and every document is read
    once per epoch; what is left of the row is padding, which does not change its state. With a
    carried state, documents follow each other in streams without padding, and one that is longer
    than a segment continues in the next one.

    Every token of an answer has the same weight, whatever row it is in: the loss of a row is the
    sum over its answer tokens, divided by their mean number per row of the data. The mean over many
    rows is the loss per answer token.

    Args:
        tokenizer: makes the ids; bytes by default.
        data: tables or datasets whose rows have `prompt` and `completion`, or `messages`
            (`longrnn.training.instructions`), or a corpus of them.
        corpus: a folder that `longrnn data build --instruct` wrote.
        part: `all` documents; or `training` and `held_out`, which divide them
            (`longrnn.tasks.held_out`).
        packing: whether documents share rows; otherwise each has one of its own.
        truncate: whether documents longer than a row lose their ends; otherwise they are refused.
        split: of datasets: the split to train on.
        subset: of datasets: the configuration, for those that have several.
        revision: of datasets on the Hub: a branch, tag or commit.
        append_eos: whether a completion ends with the tokenizer's end-of-sequence token.
        max_tokens: stop reading `data` after the document that reaches this many tokens.
    """

    default_length = 256
    reads_answers = True
    reads_in_order = True

    def __init__(
        self,
        tokenizer: Tokenizer | None = None,
        *,
        data: Any = None,
        corpus: str | None = None,
        part: str = "all",
        packing: bool = True,
        truncate: bool = False,
        split: str = "train",
        subset: str | None = None,
        revision: str | None = None,
        append_eos: bool = True,
        max_tokens: TokenCount | None = None,
    ) -> None:
        if (corpus is None) == (data is None):
            raise UserError(
                "the instruct task needs one source: set either data (tables or datasets of "
                "prompts and answers) or corpus (a folder of `longrnn data build --instruct`)"
            )
        tokenizer = tokenizer or ByteTokenizer()
        self.vocab_size, self.packing, self.truncate = tokenizer.vocab_size, packing, truncate
        whole = open_corpus(corpus, data, tokenizer)
        whole.read_scored(0, 0, 1)  # refuses a corpus without answers
        self.corpus, self.part = whole.folder, part
        self.documents = part_of(whole, part)
        self._scored_tokens = int(self.documents.scored_tokens)
        self._whole: dict[tuple[int, int, int], WholeDocuments] = {}
        self._streams: dict[tuple[int, int, int], PackedStreams] = {}
        self._cut: tuple[int, np.ndarray, int] | None = None

    def sample(self, batch_size: int, *, length: int, generator: torch.Generator) -> Batch:
        """One document per row, all different while there are enough of them.

        Validation draws them; training reads `whole_documents` or `segment`.
        """
        sizes, scored = self._fitted(length)
        usable = np.flatnonzero(sizes)
        order = torch.randperm(len(usable), generator=generator)
        drawn = order[torch.arange(batch_size) % len(usable)].tolist()
        pieces = [[Piece(int(usable[k]), 0, int(sizes[usable[k]]), True)] for k in drawn]
        return self._batch(pieces, length, scored / len(usable))

    def whole_documents(
        self, streams: Sequence[int], step: int, *, n_streams: int, length: int, seed: int
    ) -> Batch:
        layout = self._rows(n_streams, length, seed)
        pieces = [layout.pieces(stream, step) for stream in streams]
        return self._batch(pieces, length, self._fitted(length)[1] / layout.documents)

    def segment(
        self, streams: Sequence[int], step: int, *, n_streams: int, length: int, seed: int
    ) -> Batch:
        layout = self._laid_out(n_streams, length, seed)
        pieces = [layout.pieces(stream, step) for stream in streams]
        scored = self._scored_tokens or 1
        return self._batch(pieces, length, scored * length / sum(layout.epochs))

    def most_rows(self, length: int, *, seed: int, is_carried: bool) -> int | None:
        return (self._laid_out if is_carried else self._rows)(1, length, seed).documents

    def whole_layout(self, n_streams: int, *, length: int, seed: int) -> str:
        layout = self._rows(n_streams, length, seed)
        sizes, _ = self._fitted(length)
        used = int(sizes.sum()) / (layout.documents * length)
        cut = int((self.documents.lengths - 1 > length).sum())
        empty = int((sizes == 0).sum())
        shortened = (
            f"; truncated: {cut:,} documents, of which {empty:,} have no answer left and are "
            "left out"
        )
        return (
            f"{int((sizes > 0).sum()):,} documents in {layout.documents:,} rows per epoch, of "
            f"whose tokens {1 - used:.1%} are padding" + (shortened if cut else "")
        )

    def layout(self, n_streams: int, *, length: int, seed: int) -> str:
        streams = self._laid_out(n_streams, length, seed)
        return (
            f"{streams.documents:,} documents in {n_streams:,} streams, whose epochs have "
            f"{min(streams.epochs):,} to {max(streams.epochs):,} tokens"
        )

    def longest_document(self, length: int) -> int:
        return -(-(int(self.documents.lengths.max()) - 1) // length)

    def score(self, predictions: Tensor, batch: Batch) -> dict[str, Tensor]:
        """`accuracy`: the share of answer tokens that are right; rows without any are left out."""
        answers = batch.answers()
        right = ((predictions == batch.targets) & answers).sum(1)
        total = answers.sum(1)
        return {"accuracy": (right[total > 0] / total[total > 0]).float()}

    def data_sha256(self) -> str:
        return self.documents.sha256

    def _batch(self, rows: Sequence[Sequence[Piece]], length: int, scored_per_row: float) -> Batch:
        batch = packed(self.documents, rows, length, read_scored=self.documents.read_scored)
        return batch._replace(weights=batch.answers().float() / scored_per_row)

    def _fitted(self, length: int) -> tuple[np.ndarray, int]:
        """The tokens of each document in a row of `length`, and all answer tokens among them.

        A document whose answers are all cut off has size 0.

        Raises:
            UserError: a document is longer than a row, and documents are not truncated.
        """
        if self._cut is None or self._cut[0] != length:
            sizes = self.documents.lengths - 1
            long = np.flatnonzero(sizes > length)
            if len(long) and not self.truncate:
                raise UserError(
                    f"{len(long):,} of {len(sizes):,} documents have more than {length:,} tokens, "
                    f"the longest {int(sizes.max()):,}: raise length.max, continue them over "
                    "segments with initial_state={kind: carry}, or cut them with "
                    "task.truncate=true"
                )
            sizes, scored = np.minimum(sizes, length), self._scored_tokens
            for which in long.tolist():
                whole = self.documents.read_scored(which, 0, int(self.documents.lengths[which]))
                kept = int(whole[1 : length + 1].sum())
                scored -= int(whole.sum()) - kept
                sizes[which] *= kept > 0
            if not sizes.any():
                raise UserError(
                    f"no answer begins within the first {length:,} tokens of its document: raise "
                    "length.max"
                )
            self._cut = length, sizes, scored
        return self._cut[1:]

    def _rows(self, n_streams: int, length: int, seed: int) -> WholeDocuments:
        key = n_streams, length, seed
        if key not in self._whole:
            sizes, _ = self._fitted(length)
            most = length if self.packing else 0
            self._whole[key] = WholeDocuments(sizes, n_streams=n_streams, most=most, seed=seed)
        return self._whole[key]

    def _laid_out(self, n_streams: int, length: int, seed: int) -> PackedStreams:
        key = n_streams, length, seed
        if key not in self._streams:
            lengths = self.documents.lengths
            self._streams[key] = PackedStreams(
                lengths, n_streams=n_streams, length=length, max_segments=None, seed=seed
            )
        return self._streams[key]
