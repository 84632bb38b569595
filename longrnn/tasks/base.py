"""The contract of a task: batches to train on, and scores of predictions."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from longrnn.errors import UserError
from longrnn.registry import Registry
from longrnn.text import Tokenizer

UNSCORED = -100
# Independent rows that are drawn together, see `Task.sample_part`.
BLOCK = 512


class Batch(NamedTuple):
    """A batch of training rows.

    Attributes:
        tokens: `(b, t)` int64, the model's input.
        targets: `(b, t)` int64, the tokens that the logits at the same place predict; −100 where
            unscored.
        is_document_start: `(b, t)` bool, true at the first token of each document. In the first
            column: whether a row begins anew (false: it continues the row of the last batch). In
            the others: where one document of a packed row ends and the next one begins. A batch of
            rows with one document each may have the first column only, `(b,)`.
        weights: `(b, t)` weights of the loss, which is the mean over rows of the weighted sum over
            tokens; by default the mean over a row's scored tokens.
        answer: `(b, t)` bool, the places that `Task.score` evaluates; by default all scored ones.
        query_length: the last `query_length` tokens run on a fork of the state; the carried state
            is the one before them.
        repeat: `(b,)` int64, repetitions of the tokens before the query in the carried state; by
            default 1.
        is_token: `(b, t)` bool, false for the padding at the end of a row, which does not change
            its state; None where there is none.
        n_scored: number of targets that are not negative, of a batch that was checked and counted
            before it was moved to a device (`Objective.placed`); None for any other.
    """

    tokens: Tensor
    targets: Tensor
    is_document_start: Tensor
    weights: Tensor | None = None
    answer: Tensor | None = None
    query_length: int = 0
    repeat: Tensor | None = None
    is_token: Tensor | None = None
    n_scored: int | None = None

    @property
    def begins(self) -> Tensor:
        """`(b,)` bool: rows that do not continue the row of the last batch."""
        starts = self.is_document_start
        return starts if starts.ndim == 1 else starts[:, 0]

    def inner_starts(self) -> Tensor | None:
        """`is_document_start` without its first column; None where no row has several documents.

        The first column is left out because the state from which a row starts decides there.
        """
        if self.is_document_start.ndim == 1 or not bool(self.is_document_start[:, 1:].any()):
            return None
        starts = self.is_document_start.clone()
        starts[:, 0] = False
        return starts

    def answers(self) -> Tensor:
        """`(b, t)` bool: the places that are scored."""
        return self.targets != UNSCORED if self.answer is None else self.answer

    def rows(self, start: int, stop: int) -> Batch:
        """The rows from `start` up to `stop`."""
        return self._map(lambda field: field[start:stop])._replace(n_scored=None)

    def to(self, device: torch.device) -> Batch:
        """The same batch on `device`; a pinned one is copied while the caller continues."""
        return self._map(lambda field: field.to(device, non_blocking=device.type != "cpu"))

    def pinned(self) -> Batch:
        """The same batch in page-locked memory, from which a GPU copies in the background."""
        return self._map(lambda field: field.pin_memory())

    def _map(self, function: Callable[[Tensor], Tensor]) -> Batch:
        fields: list[Any] = [function(f) if isinstance(f, Tensor) else f for f in self]
        return Batch(*fields)


def joined(parts: Sequence[Batch]) -> Batch:
    """The rows of several batches of the same task and length; narrower ones are padded."""
    if len(parts) == 1:
        return parts[0]
    width = max(part.tokens.shape[1] for part in parts)
    columns: dict[str, Any] = {}
    for name, column in zip(Batch._fields, zip(*parts, strict=True), strict=True):
        if isinstance(column[0], Tensor) and column[0].ndim == 2:
            blank = UNSCORED if name == "targets" else 0
            column = [F.pad(x, (0, width - x.shape[1]), value=blank) for x in column]
        columns[name] = torch.cat(column) if isinstance(column[0], Tensor) else column[0]
    return Batch(**{**columns, "n_scored": None})


def _block_seed(seed: int, block: int) -> int:
    """A seed of 63 bits for a block of rows."""
    digest = hashlib.sha256(f"{seed}/block/{block}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


def row_starts(tokens: Tensor, begins: Tensor | bool = True) -> Tensor:
    """`Batch.is_document_start` of rows with one document each.

    Args:
        tokens: `(b, t)`.
        begins: `(b,)` bool or one for all rows, whether a row begins anew.
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
        default_length: the default `length` of `sample`.
        reads_answers: whether it needs a corpus of prompts and answers.
        packing: whether rows may hold several documents.
        reads_in_order: whether training without a carried state reads every document once per epoch
            (`whole_documents`), and does not draw independent rows (`sample`).
    """

    vocab_size: int
    default_length: int
    reads_answers = False
    packing = False
    reads_in_order = False

    @abstractmethod
    def __init__(self, tokenizer: Tokenizer | None = None) -> None: ...

    @abstractmethod
    def sample(self, batch_size: int, *, length: int, generator: torch.Generator) -> Batch:
        """Draws independent rows of one length to train on, never a held-out one."""

    def sample_part(self, rows: range, batch_size: int, *, length: int, seed: int) -> Batch:
        """The rows `rows` of a batch of `batch_size` independent rows that `seed` determines.

        The whole batch is the same however it is divided. Batches of more than `BLOCK` rows are
        drawn in blocks of their own seeds, so that a process draws little more than its own rows.

        Args:
            rows: consecutive rows of the batch.
            batch_size: rows of all processes together.
            length: see `sample`.
            seed: of the batch.
        """
        parts = []
        for number in range(rows.start // BLOCK, (rows.stop - 1) // BLOCK + 1):
            first = number * BLOCK
            own = seed if number == 0 else _block_seed(seed, number)
            generator = torch.Generator().manual_seed(own)
            size = min(BLOCK, batch_size - first)
            drawn = self.sample(size, length=length, generator=generator)
            parts.append(drawn.rows(max(0, rows.start - first), min(size, rows.stop - first)))
        return joined(parts)

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

    def whole_documents(
        self, streams: Sequence[int], step: int, *, n_streams: int, length: int, seed: int
    ) -> Batch:
        """As `segment`, for runs that carry no state: no document continues in the next segment.

        Raises:
            UserError: a task without `reads_in_order`.
        """
        raise UserError(
            f"task {type(self).__name__.lower()!r} draws independent rows: read them with sample"
        )

    def longest_document(self, length: int) -> int:
        """Segments of `length` tokens of the longest document that `segment` may give."""
        raise self._no_documents()

    def most_rows(self, length: int, *, seed: int, is_carried: bool) -> int | None:
        """How many rows of a step there are documents for; None for any number.

        Args:
            length: tokens of a row.
            seed: of the run.
            is_carried: whether rows are those of `segment`, or of `whole_documents`.
        """
        return None

    def layout(self, n_streams: int, *, length: int, seed: int) -> str:
        """What `segment` leaves out, in words; empty if it uses all documents."""
        return ""

    def whole_layout(self, n_streams: int, *, length: int, seed: int) -> str:
        """How `whole_documents` fills rows, and what it leaves out, in words."""
        return ""

    def left_out(self, length: int) -> str:
        """Which texts no row of `sample` holds, in words; empty if it draws from all of them."""
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
