"""Batches to train on, and the contract of a task that makes and scores them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from longrnn.errors import UserError
from longrnn.registry import Registry

UNSCORED = -100


class Batch(NamedTuple):
    """A batch of training rows.

    Attributes:
        tokens: `(b, t)` int64, the model's input.
        targets: `(b, t)` int64, the tokens that the logits at the same place predict; −100 where
            unscored.
        is_document_start: `(b, t)` bool, true at the first token of each document. In the first
            column: whether a row begins anew (false: it continues the row of the last batch). In
            the others: where one document of a row ends and the next one begins.
        weights: `(b, t)` weights of the loss, which is the mean over rows of the weighted sum over
            tokens; by default the mean over a row's scored tokens.
        answer: `(b, t)` bool, the places that `Task.score` evaluates; by default all scored ones.
        query_length: the last `query_length` tokens run on a fork of the state; the carried state
            is the state before them.
        repeat: `(b,)` int64, repetitions of the tokens before the query in the carried state; by
            default 1.
        is_token: `(b, t)` bool, false for the padding at the end of a row, which does not change
            its state; None where there is none.
    """

    tokens: Tensor
    targets: Tensor
    is_document_start: Tensor
    weights: Tensor | None = None
    answer: Tensor | None = None
    query_length: int = 0
    repeat: Tensor | None = None
    is_token: Tensor | None = None

    @property
    def begins(self) -> Tensor:
        """`(b,)` bool: rows that do not continue the row of the last batch."""
        return self.is_document_start[:, 0]

    def inner_starts(self) -> Tensor | None:
        """`is_document_start` without its first column; None where no row has several documents.

        The first column is left out because the state from which a row starts decides there.
        """
        starts = self.continued().is_document_start
        return starts if bool(starts.any()) else None

    def continued(self) -> Batch:
        """The same batch, whose rows continue those of the last one."""
        starts = self.is_document_start.clone()
        starts[:, 0] = False
        return self._replace(is_document_start=starts)

    def answers(self) -> Tensor:
        """`(b, t)` bool: the places that are scored."""
        return self.targets != UNSCORED if self.answer is None else self.answer

    def split(self, length: int) -> list[Batch]:
        """Segments of at most `length` tokens whose mean loss is that of this batch, with weights.

        The batch has no query and no repetitions.
        """
        assert self.weights is not None
        whole = self._replace(weights=self.weights * -(-self.tokens.shape[1] // length))
        starts = range(0, self.tokens.shape[1], length)
        return [whole._map(lambda field, at=at: field[:, at : at + length]) for at in starts]

    def row(self, *indices: int) -> Batch:
        """Some of the rows."""
        return self._map(lambda field: field[list(indices)])

    def to(self, device: torch.device) -> Batch:
        """The same batch on `device`."""
        return self._map(lambda field: field.to(device, non_blocking=device.type != "cpu"))

    def _map(self, function: Callable[[Tensor], Tensor]) -> Batch:
        fields: list[Any] = [function(f) if isinstance(f, Tensor) else f for f in self]
        return Batch(*fields)


def row_starts(tokens: Tensor, begins: Tensor | bool = True) -> Tensor:
    """`Batch.is_document_start` of rows with one document each.

    Args:
        tokens: `(b, t)`.
        begins: `(b,)` bool, or one value for all rows, whether a row begins anew.
    """
    starts = torch.zeros(tokens.shape, dtype=torch.bool)
    starts[:, 0] = begins
    return starts


class Task(ABC):
    """A source of batches.

    Args of every member's constructor: `tokenizer`, which tasks made of text read and the others
    ignore; options are keyword-only.

    Attributes:
        vocab_size: number of ids in use; a model for the task needs at least as many.
        carries: whether rows can continue from batch to batch.
        data_sha256: hash of the texts that batches are made of; empty for tasks without texts.
    """

    vocab_size: int
    carries = False
    data_sha256 = ""

    @abstractmethod
    def batch(
        self, index: int, rows: range, *, of: int, length: int, seed: int, carried: bool
    ) -> Batch:
        """Some rows of one batch, a pure function of the arguments.

        Any process can make any rows of any batch: two processes with half of the rows each read
        what one process with all of them reads.

        Args:
            index: which batch of the run, counted from 0.
            rows: which rows of the batch.
            of: how many rows the batch of all processes has.
            length: tokens of a row; a task may append a query (`Batch.query_length`).
            seed: of the run.
            carried: whether each row continues that of the batch before (needs `carries`).

        Raises:
            LengthError: rows of this length cannot be made.
        """

    def documents(self, index: int, rows: range, *, of: int, length: int, seed: int) -> list[Batch]:
        """Consecutive segments of rows that hold one whole document each; see `batch`.

        Raises:
            UserError: the task has no documents of its own.
        """
        raise UserError(
            f"segments_per_step=all reads the documents of a corpus, and the task "
            f"{type(self).__name__} makes its rows itself: give segments_per_step a number"
        )

    def sample(self, count: int, *, length: int, seed: int = 0) -> Batch:
        """Independent training rows."""
        return self.batch(0, range(count), of=count, length=length, seed=seed, carried=False)

    def held_out(self, count: int, *, length: int) -> Batch:
        """Rows to validate on, the same ones for every seed."""
        return self.sample(count, length=length, seed=-1)

    def score(self, predictions: Tensor, batch: Batch) -> dict[str, Tensor]:
        """Scores by name, `(b',)` float each, of predicted ids `(b, t)`.

        `token_accuracy` is the share of the tokens of answers that are right, and `exact_match` is
        1 where all of them are. Rows without an answer are left out.
        """
        answers = batch.answers()
        right, total = ((predictions == batch.targets) & answers).sum(1), answers.sum(1)
        share = (right / total)[total > 0]
        return {"token_accuracy": share, "exact_match": (share == 1).float()}

    def summary(self, length: int) -> str:
        """What it reads in rows of a length, for the first line of a run; may be empty."""
        return ""


TASKS: Registry[Task] = Registry("task")
