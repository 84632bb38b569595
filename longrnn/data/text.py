"""Language modelling: the next token of a text, or of the answers to prompts."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from longrnn.data.batch import TASKS, UNSCORED, Batch, Task
from longrnn.data.build import corpus_of
from longrnn.data.stream import Documents, Order, Whole, shuffled
from longrnn.errors import LengthError, UserError
from longrnn.options import Tokens
from longrnn.text import ByteTokenizer, Reading, Tokenizer


@TASKS.register("text")
class Text(Task):
    """Predict the next token of a text at every token.

    With the text `to be` and length 4, one byte per token:

        tokens   t o   b
        targets  o   b e

    Documents of any length follow each other in a row, each from the zero state. The last token of
    a document is predicted and predicts nothing. Every token is read once per epoch.

    Args:
        tokenizer: makes the ids of the text; bytes by default.
        data: a corpus of `longrnn data build`; or files, folders and datasets, which are tokenized
            when training starts (`longrnn.data.sources`). The other options but `part` say how.
        part: `all` documents; or `training` and `held_out`, which divide them.
        text_column: of tables: the column with the text.
        split: of datasets: the split to train on.
        subset: of datasets: the configuration, for those that have several.
        revision: of datasets on the Hub: a branch, tag or commit.
        split_on: text that separates documents inside a file; by default a file is a document.
        append_eos: whether each document ends with the tokenizer's end-of-sequence token; by
            default an answer does, if the tokenizer has one, and a text does not.
        max_tokens: stop reading `data` after the document that reaches this many tokens.

    Attributes:
        documents: those of the part to train on.
    """

    carries = True
    answers = False

    def __init__(
        self,
        tokenizer: Tokenizer | None = None,
        *,
        data: str | list[str],
        part: str = "all",
        text_column: str = "text",
        split: str = "train",
        subset: str | None = None,
        revision: str | None = None,
        split_on: str | None = None,
        append_eos: bool | None = None,
        max_tokens: Tokens | None = None,
    ) -> None:
        tokenizer = tokenizer or ByteTokenizer()
        self.vocab_size = tokenizer.vocab_size
        reading = Reading(
            instruct=self.answers,
            text_column=text_column,
            split=split,
            subset=subset,
            revision=revision,
            split_on=split_on,
            append_eos=append_eos,
            max_tokens=max_tokens,
        )
        corpus = corpus_of(data, reading, tokenizer)
        corpus.check_tokenizer(tokenizer)
        if self.answers and corpus.scored is None:
            raise UserError(
                f"{corpus.folder} holds texts without prompts and answers: build it with "
                "`longrnn data build --instruct`, or train on it with task.kind=text"
            )
        self.documents = Documents(corpus, part, answers=self.answers)
        self.windows = lru_cache(2)(shuffled)

    def batch(
        self, index: int, rows: range, *, of: int, length: int, seed: int, carried: bool
    ) -> Batch:
        if carried:
            self._check(of * length)
            return self._carried(index, rows, of, length, seed)
        number = index * of + np.arange(rows.start, rows.stop)
        count = self._row_count(length, seed)
        chosen = [
            int(self.windows(count, f"{seed}/{one // count}/rows")[one % count]) for one in number
        ]
        return self._independent(chosen, length, seed)

    def _carried(self, index: int, rows: range, of: int, length: int, seed: int) -> Batch:
        """Segment `index` of each row, which reads its share of every epoch."""
        edges = self.documents.places * np.arange(rows.start, rows.stop + 1) // of
        first, size = edges[:-1, None], np.diff(edges)[:, None]
        epoch, within = np.divmod(index * length + np.arange(length), size)
        where, starts = np.zeros_like(within), within == 0
        for one in np.unique(epoch):
            own = epoch == one
            order = self.documents.order(seed, int(one))
            where[own], begins = self.documents.locate(order, (first + within)[own])
            starts[own] |= begins
        return Batch(*self.documents.targets(where), torch.from_numpy(starts))

    def _row_count(self, length: int, seed: int) -> int:
        """Independent rows in an epoch."""
        self._check(length)
        return -(-self.documents.places // length)

    def _independent(self, chosen: Sequence[int], length: int, seed: int | str) -> Batch:
        """Windows by number; what the last one lacks is padding."""
        places = np.array(chosen)[:, None] * length + np.arange(length)
        return self._window(places, self.documents.order(seed, 0))

    def _window(self, places: Whole, order: Order) -> Batch:
        """The rows at some places, each from the zero state; places beyond the end are padding."""
        real = places < self.documents.places
        where, starts = self.documents.locate(order, np.where(real, places, 0))
        starts[:, 0] = True
        return self._rows(where, starts & real, real)

    def _rows(self, where: Whole, starts: NDArray[np.bool_], real: NDArray[np.bool_]) -> Batch:
        """Rows of tokens at indices of the corpus; what is not `real` is padding."""
        tokens, targets = self.documents.targets(where)
        is_token = torch.from_numpy(real)
        tokens, targets = tokens.where(is_token, 0), targets.where(is_token, UNSCORED)
        batch = Batch(tokens, targets, torch.from_numpy(starts))
        return batch if real.all() else batch._replace(is_token=is_token)

    def held_out(self, count: int, *, length: int) -> Batch:
        """Rows at even distances in all documents."""
        self._check(length)
        first = (self.documents.places - length) * np.arange(count) // max(1, count - 1)
        places = first[:, None] + np.arange(length)
        return self._window(places, self.documents.order("held out", 0))

    def _check(self, needed: int) -> None:
        """Raises LengthError where there are not so many tokens to predict."""
        if self.documents.places < needed:
            raise LengthError(
                f"the data has {self.documents.places:,} tokens to predict and {needed:,} are "
                "needed at a time: use fewer or shorter rows, or give more text"
            )

    def longest(self, length: int) -> int | None:
        return int(self.documents.lengths.max()) - 1

    def score(self, predictions: Tensor, batch: Batch) -> dict[str, Tensor]:
        """`accuracy`: the share of scored tokens that are right, in rows that have any."""
        answers = batch.answers()
        right, total = ((predictions == batch.targets) & answers).sum(1), answers.sum(1)
        return {"accuracy": (right[total > 0] / total[total > 0]).float()}

    def summary(self, of: int, length: int, carried: bool) -> str:
        found = self.documents
        return (
            f"{len(found.lengths):,} documents with {found.places:,} tokens to predict, "
            f"{found.places / (of * length):,.1f} batches per epoch"
        )

    def data_sha256(self) -> str:
        return self.documents.sha256


@TASKS.register("instruct")
class Instruct(Text):
    """Predict the tokens of answers; the tokens of prompts have no target.

    With the prompt `2+2=`, the completion `4` and length 4, one byte per token:

        tokens   2 + 2 =
        targets  . . . 4

    A document is a prompt with its answer, or a conversation with several. An independent row holds
    as many whole documents as fit, each from the zero state; the rest of it is padding, and a
    document that is longer than a row loses its end. Carried rows read documents without padding,
    and one that is longer than a segment continues in the next one.

    Every token of an answer has the same weight, whatever row it is in: the loss of a row is the
    sum over its answer tokens, divided by their mean number per row of the data.

    `data` are tables or datasets whose rows have `prompt` and `completion`, or `messages`, or a
    corpus of them. The options are those of the task `text`, without `text_column` and `split_on`.
    """

    answers = True

    @cached_property
    def packed(self) -> Callable[[int, Any], list[Whole]]:
        """The documents of each row, for a length and a seed."""
        return lru_cache(4)(self._packed)

    @cached_property
    def _answer_tokens(self) -> int:
        return int(self.documents.answer_tokens().sum())

    def batch(
        self, index: int, rows: range, *, of: int, length: int, seed: int, carried: bool
    ) -> Batch:
        batch = super().batch(index, rows, of=of, length=length, seed=seed, carried=carried)
        share = self._answer_tokens / (
            self.documents.places / length if carried else self._row_count(length, seed)
        )
        return batch._replace(weights=batch.answers().float() / share)

    def held_out(self, count: int, *, length: int) -> Batch:
        """One document per row, all different while there are enough of them."""
        order = shuffled(len(self.documents.lengths), "held out rows")
        rows = [order[[k % len(order)]] for k in range(count)]
        return self._filled(rows, int(self._sizes(length)[np.concatenate(rows)].max()))

    def summary(self, of: int, length: int, carried: bool) -> str:
        if carried:
            return super().summary(of, length, carried)
        sizes, rows = self._sizes(length), self._row_count(length, 0)
        cut = int((self.documents.lengths - 1 > length).sum())
        return (
            f"{len(sizes):,} documents in {rows:,} rows per epoch, "
            f"{1 - int(sizes.sum()) / (rows * length):.1%} of which is padding"
            + (f"; {cut:,} documents are longer and lose their ends" if cut else "")
        )

    def _sizes(self, length: int) -> Whole:
        """The places of each document in a row."""
        return np.minimum(self.documents.lengths - 1, length)

    def _row_count(self, length: int, seed: int) -> int:
        return len(self.packed(length, seed))

    def _packed(self, length: int, seed: Any) -> list[Whole]:
        order = shuffled(len(self.documents.lengths), f"{seed}/packed")
        ends, cuts = np.cumsum(self._sizes(length)[order]).tolist(), [0]
        while cuts[-1] < len(ends):
            before = ends[cuts[-1] - 1] if cuts[-1] else 0
            cuts.append(bisect_right(ends, before + length, cuts[-1]))
        return np.split(order, cuts[1:-1])

    def _independent(self, chosen: Sequence[int], length: int, seed: Any) -> Batch:
        packed = self.packed(length, seed)
        return self._filled([packed[row] for row in chosen], length)

    def _filled(self, rows: Sequence[Whole], length: int) -> Batch:
        """Rows of whole documents, one after the other, and padding."""
        where = np.zeros((len(rows), length), dtype=np.int64)
        starts, real = (np.zeros(where.shape, dtype=bool) for _ in range(2))
        sizes = self._sizes(length)
        for row, documents in enumerate(rows):
            place = 0
            for document in documents.tolist():
                size, first = int(sizes[document]), self.documents.first(document)
                where[row, place : place + size] = np.arange(first, first + size)
                starts[row, place] = True
                place += size
            real[row, :place] = True
        return self._rows(where, starts, real)
