"""Bits per byte by position in a suite."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from longrnn import processes
from longrnn.comparison.suites.base import (
    EVALUATIONS,
    Evaluation,
    Measurement,
    Metric,
    sorted_lengths,
)
from longrnn.errors import UserError
from longrnn.evaluation import bits
from longrnn.evaluation.bits import Scored
from longrnn.evaluation.perplexity import losses
from longrnn.evaluation.texts import Document, tokenised
from longrnn.evaluation.windows import shared_places
from longrnn.hf.opened import OpenCheckpoint
from longrnn.inference.engine import out_of_reach
from longrnn.inference.overlapping import Overlap
from longrnn.intervals import figure
from longrnn.progress import Progress
from longrnn.results import Results, Row
from longrnn.text import read_text
from longrnn.units import TokenCount, format_length

logger = logging.getLogger(__name__)


class Part(NamedTuple):
    """A part of a text, tokenized for one model.

    Attributes:
        document: the part.
        text_sha256: SHA-256 of the whole text.
        number: index of the part.
        places: indices of the tokens between the columns, one more than there are columns; they
            end at the same bytes for every model.
        cuts: the bytes of the part at which these tokens end.
    """

    document: Document
    text_sha256: str
    number: int
    places: list[int]
    cuts: list[int]

    def tokens(self, columns: int) -> Tensor:
        """Return the tokens for the first columns; the last one is only predicted."""
        return self.document.tokens[self.places[0] : self.places[columns] + 1]

    def length(self, columns: int) -> int:
        """Return the number of tokens that are read for the first columns."""
        return self.places[columns] - self.places[0]

    def identity(self, columns: int) -> tuple[str, int, tuple[int, ...]]:
        """Return the key of the row with the first columns."""
        return self.text_sha256, self.number, tuple(self.cuts[: columns + 1])


@EVALUATIONS.register("perplexity")
class BitsPerByte(Evaluation):
    """Loss in bits per byte by position, on the same bytes for all models.

    Every text is cut into parts with equal numbers of characters, each of which is read once from
    an empty state. A column has the positions between the previous length and its own, in tokens of
    the first model; other models score the same bytes, cut at borders of all tokenizers (see
    `longrnn.evaluation.windows.shared_places`). Each part is one sample.

    Args:
        title: see `Evaluation`.
        seed: see `Evaluation`; not used.
        texts: files of UTF-8 text.
        lengths: tokens of the first model, such as `[256, 4k]`.
        windows: parts of each text.
        batch_size: parts in one batch.
        context: with `stride`, tokens are scored in overlapping windows of this many tokens, each
            read from an empty state; a further column has the tokens read per scored token.
        stride: tokens between the starts of two overlapping windows.
    """

    GROWING: ClassVar[tuple[str, ...]] = ("lengths", "texts", "batch_size")

    def __init__(
        self,
        title: str,
        seed: int,
        *,
        texts: list[str],
        lengths: list[str],
        windows: int = 4,
        batch_size: int = 4,
        context: TokenCount | None = None,
        stride: TokenCount | None = None,
    ) -> None:
        super().__init__(title, seed)
        self.texts = [Path(text) for text in dict.fromkeys(texts)]
        self.lengths = sorted_lengths(lengths)
        self.windows, self.batch_size = windows, batch_size
        self.metric = Metric(f"{title}, bits per byte", bits.estimate, bits.difference, ".3f")
        self.read = Metric(f"{title}, tokens read per token", figure, form=".2f")
        self.overlap: Overlap | None = None
        self._parts: dict[str, list[Part]] = {}  # by model
        if context is not None and stride is not None:
            self.overlap = Overlap(context, stride)
            self.overlap.check()
        elif context is not None or stride is not None:
            raise UserError(
                "overlapping windows need their length and their distance: set both context and "
                "stride, or neither"
            )
        if not texts or windows < 1 or batch_size < 1:
            raise UserError(
                "perplexity needs texts, and windows and batch_size of at least 1: set all three"
            )

    def prepare(self, models: Sequence[OpenCheckpoint]) -> None:
        """Cut the texts at borders of all tokenizers.

        Raises:
            UserError: a file is not text, is too short, or is given twice; or the byte offsets of
                a tokenizer are not known.
        """
        self._parts = {model.name: [] for model in models}
        places = [0, *self.lengths]
        for path, digest, number, piece in self._pieces():
            name = f"part {number + 1} of {path.name}"
            read = [tokenised(name, digest, piece, model.tokenizer) for model in models]
            self._refuse_short(read[0], models[0])
            for model, document, own in zip(models, read, shared_places(read, places), strict=True):
                if document.byte_ends is None:
                    raise UserError(
                        f"the tokenizer of {model.name} has no byte offsets, so that its loss has "
                        "no bits per byte: leave perplexity or the model out"
                    )
                cuts = document.byte_ends[torch.tensor(own)].tolist()
                self._parts[model.name].append(Part(document, digest, number, own, cuts))

    def measure(self, model: OpenCheckpoint, output: Path, *, quiet: bool) -> list[Measurement]:
        parts = self._parts[model.name]
        reasons = [
            out_of_reach(model.model, self._longest(max(part.length(column) for part in parts)))
            for column in range(1, len(self.lengths) + 1)
        ]
        columns = sum(reason is None for reason in reasons)
        rows = self._rows(model, columns, output, quiet) if columns else []
        measurements = []
        for column, (length, reason) in enumerate(zip(self.lengths, reasons, strict=True)):
            samples = {_key(row): _scored(row, column) for row in rows if reason is None}
            measurements.append(Measurement(self.metric, length, samples, reason))
            if self.overlap is not None:
                lengths = [part.length(column + 1) for part in parts]
                share = sum(map(self.overlap.tokens_read, lengths)) / sum(lengths)
                cost = {"": share} if reason is None else {}
                measurements.append(Measurement(self.read, length, cost, reason))
        return measurements

    def _longest(self, length: int) -> int:
        """Return the most tokens that a model reads from an empty state to score `length`."""
        return length if self.overlap is None else min(length, self.overlap.context)

    def _rows(self, model: OpenCheckpoint, columns: int, output: Path, quiet: bool) -> list[Row]:
        """Measure the first columns; return one row per part, new and earlier ones."""
        header = {
            "evaluation": "bits per byte",
            "model": model.model.fingerprint(),
            "tokenizer": model.tokenizer.fingerprint(),
            "windows": self.windows,
            **(self.overlap._asdict() if self.overlap is not None else {}),
        }
        results = Results(output, header)
        if any("cuts" not in row for row in results.rows):
            logger.warning(
                f"{output} has rows of an earlier version, which did not count the bytes of the "
                "scored tokens: their parts are measured again"
            )
        parts = {part.identity(columns): part for part in self._parts[model.name]}
        done = {_identity(row) for row in results.rows if "cuts" in row}
        todo = [part for key, part in parts.items() if key not in done]
        total = sum(part.length(columns) for part in todo) // processes.size()
        title = f"{self.title} {model.name}"
        with Progress(title, total, unit="tokens", quiet=quiet) as progress:
            for batch in processes.share(list(self._batches(todo, columns))):
                tokens = torch.stack([part.tokens(columns) for part in batch])
                edges = torch.tensor([part.places[: columns + 1] for part in batch])
                (nats,) = losses(
                    model.model,
                    tokens,
                    [edges - edges[:, :1]],
                    progress,
                    overlap=self.overlap,
                    rows=self.batch_size,
                )
                results.append(map(_row, batch, nats.tolist()))
        results.collect()
        rows = {_identity(row): row for row in results.rows if "cuts" in row}
        return [rows[key] for key in parts]

    def _batches(self, parts: Sequence[Part], columns: int) -> Iterator[list[Part]]:
        """Yield batches of parts of equal length."""
        most = processes.batch_size(len(parts), self.batch_size)
        for length in dict.fromkeys(part.length(columns) for part in parts):
            same = [part for part in parts if part.length(columns) == length]
            for start in range(0, len(same), most):
                yield same[start : start + most]

    def _pieces(self) -> Iterator[tuple[Path, str, int, str]]:
        """Yield the parts of all texts: file, its SHA-256, index of the part, characters."""
        seen: dict[str, Path] = {}
        for path in self.texts:
            text, digest = read_text(path)
            if digest in seen:
                raise UserError(f"{path} and {seen[digest]} are the same text: give it once")
            seen[digest] = path
            for number in range(self.windows):
                start, stop = (len(text) * k // self.windows for k in (number, number + 1))
                yield path, digest, number, text[start:stop]

    def _refuse_short(self, document: Document, model: OpenCheckpoint) -> None:
        needed = self.lengths[-1] + 1
        if len(document.tokens) < needed:
            raise UserError(
                f"{document.name} has {len(document.tokens):,} tokens with the tokenizer of "
                f"{model.name} and {format_length(needed - 1)} needs {needed:,}: give longer "
                "texts, fewer windows or shorter lengths"
            )


def _row(part: Part, nats: list[float]) -> dict[str, Any]:
    """Return the row of a part, with the sum in nats between every two cuts."""
    return {
        "text": part.document.name,
        "text_sha256": part.text_sha256,
        "part": part.number,
        "cuts": part.cuts[: len(nats) + 1],
        "nats": [round(value, 6) for value in nats],
    }


def _key(row: Row) -> str:
    """Return the name of the item, which is the same for every model."""
    return f"{row['text_sha256'][:16]}/{row['part']}"


def _scored(row: Row, column: int) -> Scored:
    start, stop = row["cuts"][column : column + 2]
    return Scored(row["nats"][column], stop - start)


def _identity(row: Row) -> tuple[str, int, tuple[int, ...]]:
    return row["text_sha256"], row["part"], tuple(row["cuts"])
