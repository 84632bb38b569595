"""Bits per byte by position in a suite."""

from __future__ import annotations

import math
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from longrnn.comparison.suites.base import (
    EVALUATIONS,
    Contender,
    Evaluation,
    Metric,
    Point,
    sorted_lengths,
)
from longrnn.errors import UserError
from longrnn.evaluation.perplexity import STRETCH, losses
from longrnn.inference.reach import out_of_reach
from longrnn.intervals import mean, paired_mean
from longrnn.progress import Progress
from longrnn.results import Results, Row
from longrnn.text import read_text
from longrnn.units import format_length


class Part(NamedTuple):
    """A part of a text, in the tokens of one model.

    Attributes:
        text: name of the file.
        sha256: of the whole text.
        number: which part.
        tokens: `(n,)`.
        bytes_per_token: of this part.
    """

    text: str
    sha256: str
    number: int
    tokens: Tensor
    bytes_per_token: float

    @property
    def key(self) -> tuple[str, int]:
        """The same for every tokenizer."""
        return self.sha256, self.number


@EVALUATIONS.register("perplexity")
class BitsPerByte(Evaluation):
    """Loss in bits per byte at the positions up to each length.

    Every text is cut into equal parts by characters, so that models with different tokenizers read
    from the same places on. A part is read once from an empty state, as far as the longest length
    that the model reaches; the column at a length is the mean over the positions between it and the
    length before. Each part counts as one document.

    Args:
        title: see `Evaluation`.
        seed: see `Evaluation`; nothing is drawn here.
        texts: files of UTF-8 text.
        lengths: multiples of 64 tokens, such as `[256, 4k]`.
        windows: parts of each text.
        batch_size: parts in one batch.
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
    ) -> None:
        super().__init__(title, seed)
        self.texts = [Path(text) for text in dict.fromkeys(texts)]
        self.lengths = sorted_lengths(lengths)
        self.windows, self.batch_size = windows, batch_size
        self.metric = Metric(f"{title}, bits per byte", mean, paired_mean, ".3f")
        if not texts or windows < 1 or batch_size < 1:
            raise UserError(
                "perplexity needs texts, and windows and batch_size of at least 1: set all three"
            )
        for length in self.lengths:
            if length % STRETCH:
                raise UserError(
                    f"perplexity needs lengths in multiples of {STRETCH}, not {length}: set "
                    "another length"
                )

    def check(self, contender: Contender) -> None:
        self._parts(contender)

    def measure(self, contender: Contender, output: Path, *, quiet: bool) -> list[Point]:
        reasons = {n: out_of_reach(contender.model, n) for n in self.lengths}
        reach = max((n for n, reason in reasons.items() if reason is None), default=0)
        rows = self._rows(contender, reach, output, quiet) if reach else []
        points, bounds = [], pairwise([0, *self.lengths])
        for start, stop in bounds:
            samples = {_key(row): _bits(row, start, stop) for row in rows} if stop <= reach else {}
            points.append(Point(self.metric, stop, samples, reasons[stop]))
        return points

    def _rows(self, contender: Contender, reach: int, output: Path, quiet: bool) -> list[Row]:
        """A row a part, new and earlier ones, up to `reach`."""
        header = {
            "evaluation": "bits per byte",
            "model": contender.model.fingerprint(),
            "tokenizer": contender.tokenizer.fingerprint(),
            "windows": self.windows,
        }
        results = Results(output, header)
        parts = {(*part.key, reach): part for part in self._parts(contender)}
        done = {_identity(row) for row in results.rows}
        todo = [part for key, part in parts.items() if key not in done]
        title = f"{self.title} {contender.name}"
        with Progress(title, len(todo) * reach, unit="tokens", quiet=quiet) as progress:
            for first in range(0, len(todo), self.batch_size):
                batch = todo[first : first + self.batch_size]
                tokens = torch.stack([part.tokens[: reach + 1] for part in batch])
                _, stretches = losses(contender.model, tokens, progress)
                pairs = zip(batch, stretches.tolist(), strict=True)
                results.append(_row(part, reach, nats) for part, nats in pairs)
        rows = {_identity(row): row for row in results.rows}
        return [rows[key] for key in parts]

    def _parts(self, contender: Contender) -> list[Part]:
        """The parts of all texts.

        Raises:
            UserError: a file that is no text, has too little of it, or is given twice.
        """
        needed, parts, seen = self.lengths[-1] + 1, [], dict[str, Path]()
        for path in self.texts:
            text, digest = read_text(path)
            if digest in seen:
                raise UserError(f"{path} and {seen[digest]} are the same text: give it once")
            seen[digest] = path
            for number in range(self.windows):
                start, stop = (len(text) * k // self.windows for k in (number, number + 1))
                piece = text[start:stop]
                tokens = torch.tensor(contender.tokenizer.encode(piece), dtype=torch.long)
                if len(tokens) < needed:
                    raise UserError(
                        f"a part of {path} has {len(tokens):,} tokens with the tokenizer of "
                        f"{contender.name} and {format_length(needed - 1)} needs {needed:,}: give "
                        "longer texts, fewer windows or shorter lengths"
                    )
                size = len(piece.encode()) / len(tokens)
                parts.append(Part(path.name, digest, number, tokens, size))
        return parts


def _row(part: Part, reach: int, nats: list[float]) -> dict[str, Any]:
    """What is recorded: sums in nats over stretches of STRETCH tokens."""
    return {
        "text": part.text,
        "text_sha256": part.sha256,
        "part": part.number,
        "length": reach,
        "bytes_per_token": part.bytes_per_token,
        "stretches": [round(value, 6) for value in nats],
    }


def _identity(row: Row) -> tuple[str, int, int]:
    return row["text_sha256"], row["part"], row["length"]


def _key(row: Row) -> str:
    return f"{row['text_sha256'][:16]}/{row['part']}"


def _bits(row: Row, start: int, stop: int) -> float:
    """Mean bits per byte at the positions from `start` up to `stop`."""
    nats = sum(row["stretches"][start // STRETCH : stop // STRETCH])
    return nats / (stop - start) / math.log(2) / row["bytes_per_token"]
