"""The contract of a task: batches to train on, and scores of predictions."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from longrnn.errors import UserError
from longrnn.registry import Registry
from longrnn.text import Tokenizer

UNSCORED = -100


class Batch(NamedTuple):
    """A batch of training rows.

    Attributes:
        tokens: `(b, t)` int64, the model's input.
        targets: `(b, t)` int64, the tokens that the logits at the same place predict; −100 where
            unscored.
        is_document_start: `(b,)` bool, whether a row begins a new document (false: it continues
            the row of the last batch).
        weights: `(b, t)` weights of the loss, which is the mean over rows of the weighted sum over
            tokens; by default the mean over a row's scored tokens.
        answer: `(b, t)` bool, the places that `Task.score` evaluates; by default all scored ones.
        query_length: the last `query_length` tokens run on a fork of the state; the carried state
            is the one before them.
        repeat: `(b,)` int64, repetitions of the tokens before the query in the carried state; by
            default 1.
    """

    tokens: Tensor
    targets: Tensor
    is_document_start: Tensor
    weights: Tensor | None = None
    answer: Tensor | None = None
    query_length: int = 0
    repeat: Tensor | None = None

    def answers(self) -> Tensor:
        """`(b, t)` bool: the places that are scored."""
        return self.targets != UNSCORED if self.answer is None else self.answer

    def rows(self, start: int, stop: int) -> Batch:
        """The rows from `start` up to `stop`."""
        return self._map(lambda field: field[start:stop])

    def to(self, device: torch.device) -> Batch:
        """The same batch on `device`."""
        return self._map(lambda field: field.to(device))

    def _map(self, function: Callable[[Tensor], Tensor]) -> Batch:
        fields: list[Any] = [function(f) if isinstance(f, Tensor) else f for f in self]
        return Batch(*fields)


class Task(ABC):
    """A source of batches.

    Args of every member's constructor: `tokenizer`, which tasks made of text read and the others
    ignore; options are keyword-only.

    Attributes:
        vocab_size: number of ids in use; a model for the task needs at least as many.
        default_length: the default `length` of `sample`.
    """

    vocab_size: int
    default_length: int

    @abstractmethod
    def __init__(self, tokenizer: Tokenizer | None = None) -> None: ...

    @abstractmethod
    def sample(self, batch_size: int, *, length: int, generator: torch.Generator) -> Batch:
        """Draws independent rows of one length to train on, never a held-out one."""

    @abstractmethod
    def score(self, predictions: Tensor, batch: Batch) -> dict[str, Tensor]:
        """Scores by name, `(b,)` float each, of predicted ids `(b, t)`."""

    def segment(
        self, streams: Sequence[int], step: int, *, n_streams: int, length: int, seed: int
    ) -> Batch:
        """The `step`-th segment of continuing documents, one row per stream.

        A pure function of its arguments: any process can make any stream at any step.

        Args:
            streams: indices of the streams, counted from 0.
            step: which segment of its stream, counted from 0.
            n_streams: number of streams of the run, over which documents are distributed.
            length: tokens of a segment; a task may append a query (`Batch.query_length`).
            seed: of the run.

        Raises:
            UserError: the task has no documents longer than a batch, or too few of them.
        """
        raise self._no_documents()

    def longest_document(self, length: int) -> int:
        """Segments of `length` tokens of the longest document that `segment` may give."""
        raise self._no_documents()

    def layout(self, n_streams: int, *, length: int, seed: int) -> str:
        """What `segment` leaves out, in words; empty if it uses all documents."""
        return ""

    def data_sha256(self) -> str:
        """Hash of the texts that batches are made of; empty for tasks without texts."""
        return ""

    def _no_documents(self) -> UserError:
        return UserError(
            f"task {type(self).__name__.lower()!r} has no documents longer than one batch: "
            "train it with initial_state={kind: zero}"
        )


def exact_match(predictions: Tensor, batch: Batch) -> Tensor:
    """`(b,)`: 1 where every scored place of the row is right, also if the row has none."""
    right = (predictions == batch.targets) | ~batch.answers()
    return right.all(dim=1).float()


TASKS: Registry[Task] = Registry("task")
