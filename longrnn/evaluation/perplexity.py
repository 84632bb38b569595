"""Loss by position on long texts, and whether a model forgets robustly.

Notable choices:
- A window of length L consumes L tokens from an empty state and predicts the L tokens that follow
  each of them: the loss at position i is that of the token after i + 1 tokens were read. A text of
  n tokens holds (n − 1) // L disjoint windows.
- Losses are summed while the text streams by, so that neither logits nor losses of a whole window
  exist at any time.
- Bits per byte divide by the bytes of the very tokens whose loss is summed (see
  `longrnn.evaluation.bits`), in a window and in every bucket.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from longrnn.errors import UserError
from longrnn.evaluation import bits
from longrnn.evaluation.bits import Scored
from longrnn.evaluation.texts import Document, made_by
from longrnn.evaluation.windows import Window, windows
from longrnn.inference.scoring import token_losses
from longrnn.intervals import Estimate, mean
from longrnn.models import LanguageModel
from longrnn.progress import Progress
from longrnn.results import Results, Row

# Tokens whose mean loss a row records besides its buckets: what the criterion is made of.
STRETCH = 64
# Stretches that the criterion compares inside the training length, where it is long enough.
INSIDE = 8
FACTOR = 2.0


class Bucket(NamedTuple):
    """Mean loss at positions from `start` up to `stop`, over documents.

    Attributes:
        start: the first position.
        stop: behind the last one.
        nats: per token.
        bits: per byte; None where the tokenizer does not tell its bytes, or there are none.
    """

    start: int
    stop: int
    nats: Estimate
    bits: Estimate | None


class Forgetting(NamedTuple):
    """The criterion of robust forgetting, as compared.

    Attributes:
        robust: whether `beyond` is at most FACTOR · `inside`.
        width: tokens of the stretches that are compared.
        inside: the largest mean loss of a stretch inside the training length, in nats.
        inside_at: where that stretch begins.
        beyond: the largest mean loss of the other stretches.
        beyond_at: where that one begins.
    """

    robust: bool
    width: int
    inside: float
    inside_at: int
    beyond: float
    beyond_at: int


def evaluate(
    model: LanguageModel,
    documents: Sequence[Document],
    *,
    length: int,
    output: Path,
    batch_size: int = 8,
    quiet: bool = False,
) -> list[Row]:
    """Measures the loss by position and returns its rows, new and earlier ones.

    Args:
        model: any language model.
        documents: the texts; each gives as many windows as it holds.
        length: tokens of a window, each of which starts from an empty state.
        output: the results file, taken up where it was left; texts and lengths may be added.
        batch_size: windows in one batch.
        quiet: no progress.

    Returns:
        See `evaluate_windows`.

    Raises:
        UserError: a text shorter than a window, or a results file of another run.
    """
    wanted = [window for document in documents for window in windows(document, length)]
    return evaluate_windows(model, wanted, output=output, batch_size=batch_size, quiet=quiet)


def evaluate_windows(
    model: LanguageModel,
    wanted: Sequence[Window],
    *,
    output: Path,
    batch_size: int = 8,
    quiet: bool = False,
) -> list[Row]:
    """`evaluate` on windows of any place and length.

    Returns:
        One row per window with `text`, `text_sha256`, `window`, `start`, `length`, `bytes` of the
        predicted tokens and `bucket_bytes` of those in each bucket (null where the tokenizer does
        not tell them), and mean losses in nats: `nats_per_token`, `buckets` (see `edges`),
        `stretches` of STRETCH tokens.
    """
    if batch_size < 1:
        raise UserError(
            f"the batch size must be at least 1, not {batch_size}: give a positive number"
        )
    header = {
        "evaluation": "perplexity",
        "model": model.fingerprint(),
        "tokenizer": made_by(window.document for window in wanted),
    }
    results = Results(output, header)
    asked = {_key(window): window for window in wanted}
    # Rows without the bytes, of the first versions, are measured again.
    done = {_identity(row) for row in results.rows if "bytes" in row}
    todo = [window for key, window in asked.items() if key not in done]
    total = sum(window.length for window in todo)
    with Progress("perplexity", total, unit="tokens", quiet=quiet) as progress:
        for batch in _batches(todo, batch_size):
            tokens = torch.stack([window.tokens() for window in batch])
            length = batch[0].length
            partitions = [edges(length), _stretch_edges(length)]
            buckets, stretches = losses(model, tokens, partitions, progress)
            results.append(
                {
                    "text": window.document.name,
                    "text_sha256": window.document.sha256,
                    "length": length,
                    "window": window.number,
                    "start": window.start,
                    "bytes": window.n_bytes(),
                    "bucket_bytes": window.bytes_between(edges(length)),
                    "nats_per_token": float(by_bucket.sum() / length),
                    "buckets": (by_bucket / _sizes(edges(length))).tolist(),
                    "stretches": _rounded(by_stretch / _sizes(_stretch_edges(length))),
                }
                for window, by_bucket, by_stretch in zip(batch, buckets, stretches, strict=True)
            )
    rows = {_identity(row): row for row in results.rows if "bytes" in row}
    # Rows of earlier versions lack the bytes of their buckets, which need no measurement.
    return [
        {"bucket_bytes": window.bytes_between(edges(window.length)), **rows[key]}
        for key, window in asked.items()
    ]


def _batches(windows: Sequence[Window], batch_size: int) -> Iterator[list[Window]]:
    """Windows of one length together."""
    for length in dict.fromkeys(window.length for window in windows):
        same = [window for window in windows if window.length == length]
        for start in range(0, len(same), batch_size):
            yield same[start : start + batch_size]


def edges(length: int) -> list[int]:
    """Where the buckets of a window begin, and its end: 0, 1, 2, 4, 8, …, length."""
    return [0, *(2**k for k in range((length - 1).bit_length())), length]


def losses(
    model: LanguageModel,
    windows: Tensor,
    partitions: Sequence[Sequence[int] | Tensor],
    progress: Progress | None = None,
) -> list[Tensor]:
    """Sums of the loss in nats, in one pass.

    Args:
        model: reads the windows from an empty state, piece by piece.
        windows: `(b, length + 1)`, the tokens and the one to predict last.
        partitions: each the edges of `k` parts of the positions, from 0 to `length`: `(k + 1,)`, or
            `(b, k + 1)` where every row has its own.
        progress: counts the tokens.

    Returns:
        For each partition the sums, `(b, k)` float64 on the CPU.

    Raises:
        UserError: logits that are not finite.
    """
    batch = len(windows)
    edges = [torch.as_tensor(one).expand(batch, -1).contiguous() for one in partitions]
    sums = [torch.zeros(batch, one.shape[1] - 1, dtype=torch.float64) for one in edges]
    for start, nats in token_losses(model, windows):
        positions = torch.arange(start, start + nats.shape[1]).repeat(batch, 1)
        for total, bounds in zip(sums, edges, strict=True):
            part = torch.searchsorted(bounds, positions, right=True) - 1
            total.scatter_add_(1, part, nats)
        if progress is not None:
            progress.advance(nats.numel(), nats.numel())
    return sums


def scored(row: Row, bucket: int | None = None) -> Scored:
    """What was scored in a row: the whole window, or one of its buckets.

    Args:
        row: of `evaluate`, with the bytes of its tokens.
        bucket: which one, of `edges`; None for the window.
    """
    if bucket is None:
        return Scored(row["nats_per_token"] * row["length"], row["bytes"])
    start, stop = edges(row["length"])[bucket : bucket + 2]
    return Scored(row["buckets"][bucket] * (stop - start), row["bucket_bytes"][bucket])


def summarise(rows: Sequence[Row]) -> tuple[Bucket, list[Bucket]]:
    """Mean loss over documents with Student-t intervals: of whole windows, and by bucket.

    Args:
        rows: of `evaluate`, all of one length; each counts as one document.
    """
    length = rows[0]["length"]
    known = all(row.get("bucket_bytes") is not None for row in rows)

    def bucket(start: int, stop: int, nats: list[float], which: int | None) -> Bucket:
        samples = [scored(row, which) for row in rows] if known else []
        n_bytes = sum(sample.n_bytes for sample in samples)
        return Bucket(start, stop, mean(nats), bits.estimate(samples) if n_bytes else None)

    whole = bucket(0, length, [row["nats_per_token"] for row in rows], None)
    bounds = enumerate(pairwise(edges(length)))
    return whole, [bucket(a, b, [row["buckets"][k] for row in rows], k) for k, (a, b) in bounds]


def curve(rows: Sequence[Row], width: int) -> list[tuple[int, float]]:
    """(start, mean loss over rows in nats) of stretches of `width` tokens.

    Args:
        rows: of `evaluate`, all of one length.
        width: a multiple of STRETCH; what is left at the end joins the last stretch.
    """
    length = rows[0]["length"]
    fine = _stretch_edges(length)
    sizes = _sizes(fine)
    nats = torch.tensor([row["stretches"] for row in rows], dtype=torch.float64).mean(0)
    last = max(1, length // width) - 1
    group = (torch.tensor(fine[:-1]) // width).clamp(max=last)
    sums = torch.zeros(2, last + 1, dtype=torch.float64)
    sums.index_add_(1, group, torch.stack([nats * sizes, sizes]))
    return [(k * width, float(loss)) for k, loss in enumerate(sums[0] / sums[1])]


def forgetting(rows: Sequence[Row], train_length: int) -> Forgetting | None:
    """Whether a model forgets robustly (arXiv 2410.07145).

    The published criterion: on long prompts the loss by position never exceeds 2 × the maximum
    inside the training length. Compared is the mean loss, over all documents, of stretches of
    consecutive positions: an eighth of the training length each, a multiple of STRETCH = 64 tokens
    and at least that. Inside are the stretches that end within the training length (at least the
    first one counts), beyond are all others; a loss that is no number is beyond any bound.

    Returns:
        None where no stretch lies beyond the training length.
    """
    width = max(STRETCH, train_length // INSIDE // STRETCH * STRETCH)
    stretches = curve(rows, width)
    count = max(1, train_length // width)
    inside, beyond = stretches[:count], stretches[count:]
    if rows[0]["length"] <= train_length or not beyond:
        return None

    def size(stretch: tuple[int, float]) -> float:
        return math.inf if math.isnan(stretch[1]) else stretch[1]

    (inside_at, most), (beyond_at, worst) = max(inside, key=size), max(beyond, key=size)
    robust = worst <= FACTOR * most < math.inf
    return Forgetting(robust, width, most, inside_at, worst, beyond_at)


def _key(window: Window) -> tuple[str, int, int]:
    return window.document.sha256, window.length, window.start


def _identity(row: Row) -> tuple[str, int, int]:
    return row["text_sha256"], row["length"], row["start"]


def _stretch_edges(length: int) -> list[int]:
    return [*range(0, length, STRETCH), length]


def _sizes(bounds: Sequence[int]) -> Tensor:
    return torch.tensor([stop - start for start, stop in pairwise(bounds)], dtype=torch.float64)


def _rounded(values: Tensor) -> list[float]:
    return [round(value, 6) for value in values.tolist()]
