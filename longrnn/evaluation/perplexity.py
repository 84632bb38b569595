"""Loss by position on long texts, measured in windows.

Notable choices:
- A window of length L reads L tokens from an empty state and predicts the token after each of
  them: the loss at position i is that of the token that follows the first i + 1 tokens. A text of
  n tokens has (n − 1) // L disjoint windows.
- Losses are summed piece by piece, so that neither logits nor losses of a whole window are in
  memory at once.
- With an `Overlap`, a window is scored in overlapping windows of a fixed context instead, each read
  from an empty state: the usual protocol for transformers.
- Bits per byte divide by the bytes of the tokens whose loss is summed (see
  `longrnn.evaluation.bits`), in a window and in every bucket.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from longrnn import processes
from longrnn.errors import UserError
from longrnn.evaluation import bits
from longrnn.evaluation.bits import Scored
from longrnn.evaluation.texts import Document, made_by
from longrnn.evaluation.windows import Window, windows
from longrnn.inference.engine import token_losses
from longrnn.inference.overlapping import Overlap, overlapping_losses
from longrnn.intervals import Estimate, mean
from longrnn.models import LanguageModel
from longrnn.progress import Progress
from longrnn.results import Results, Row

# Tokens of the stretches whose mean loss a row records, beside its buckets.
STRETCH = 64


class Bucket(NamedTuple):
    """Mean loss over windows, at the positions from `start` up to but not including `stop`.

    Attributes:
        start: the first position.
        stop: the position after the last one.
        nats: loss in nats per token.
        bits: loss in bits per byte; None if the byte offsets of the tokens are not known, or if
            there are no bytes.
    """

    start: int
    stop: int
    nats: Estimate
    bits: Estimate | None


def evaluate(
    model: LanguageModel,
    documents: Sequence[Document],
    *,
    length: int,
    output: Path,
    overlap: Overlap | None = None,
    batch_size: int = 8,
    quiet: bool = False,
) -> list[Row]:
    """Measure the loss by position; return all rows, new and earlier ones.

    Args:
        model: any language model.
        documents: the texts, each with as many windows as fit.
        length: tokens of a window; every window starts from an empty state.
        output: the results file, which is resumed; texts and lengths may be added.
        overlap: if set, tokens are scored in overlapping windows of this context.
        batch_size: windows in one batch.
        quiet: show no progress.

    Returns:
        See `evaluate_windows`.

    Raises:
        UserError: a text is shorter than a window, or `output` has the results of another run.
    """
    wanted = [window for document in documents for window in windows(document, length)]
    return evaluate_windows(
        model,
        wanted,
        output=output,
        overlap=overlap,
        batch_size=batch_size,
        quiet=quiet,
    )


def evaluate_windows(
    model: LanguageModel,
    wanted: Sequence[Window],
    *,
    output: Path,
    overlap: Overlap | None = None,
    batch_size: int = 8,
    quiet: bool = False,
) -> list[Row]:
    """Measure the loss by position in given windows, of any start and length; see `evaluate`.

    Returns:
        One row per window with `text`, `text_sha256`, `window`, `start`, `length`, `bytes` of the
        predicted tokens, `bucket_bytes` of those in each bucket (both null if byte offsets are not
        known), and mean losses in nats: `nats_per_token`, `buckets` (see `edges`), and
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
        **(overlap._asdict() if overlap is not None else {}),
    }
    results = Results(output, header)
    requested = {_key(window): window for window in wanted}
    # Rows of the first versions have no bytes and are measured again.
    done = {_identity(row) for row in results.rows if "bytes" in row}
    todo = [window for key, window in requested.items() if key not in done]
    most = processes.batch_size(len(todo), batch_size)
    total = sum(window.length for window in todo) // processes.size()
    with Progress("perplexity", total, unit="tokens", quiet=quiet) as progress:
        for batch in processes.share(list(_batches(todo, most))):
            tokens = torch.stack([window.tokens() for window in batch])
            length = batch[0].length
            partitions = [edges(length), _stretch_edges(length)]
            buckets, stretches = losses(
                model, tokens, partitions, progress, overlap=overlap, rows=batch_size
            )
            results.append(map(_row, batch, buckets, stretches))
    results.collect()
    rows = {_identity(row): row for row in results.rows if "bytes" in row}
    # Earlier versions did not record the bytes of the buckets, which follow from the text.
    return [
        {"bucket_bytes": window.bytes_between(edges(window.length)), **rows[key]}
        for key, window in requested.items()
    ]


def _row(window: Window, by_bucket: Tensor, by_stretch: Tensor) -> Row:
    """A row of results from the sums of losses, in nats, of each bucket and stretch."""
    length = window.length
    return {
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


def _batches(windows: Sequence[Window], batch_size: int) -> Iterator[list[Window]]:
    """Yield batches of windows of equal length."""
    for length in dict.fromkeys(window.length for window in windows):
        same = [window for window in windows if window.length == length]
        for start in range(0, len(same), batch_size):
            yield same[start : start + batch_size]


def edges(length: int) -> list[int]:
    """Return the edges of the buckets of a window: 0, 1, 2, 4, 8, …, length."""
    return [0, *(2**k for k in range((length - 1).bit_length())), length]


def losses(
    model: LanguageModel,
    windows: Tensor,
    partitions: Sequence[Sequence[int] | Tensor],
    progress: Progress | None = None,
    *,
    overlap: Overlap | None = None,
    rows: int = 1,
) -> list[Tensor]:
    """Return sums of the loss in nats over parts of windows, in one pass.

    Args:
        model: any language model; it starts from an empty state and reads the windows in pieces.
        windows: `(b, length + 1)` tokens; the last one is only predicted.
        partitions: for each partition the edges of its `k` parts, from 0 to `length`: `(k + 1,)`,
            or `(b, k + 1)` with the edges of each row.
        progress: counts the tokens.
        overlap: if set, tokens are scored in overlapping windows of this context.
        rows: overlapping windows in one batch, of all windows together.

    Returns:
        For each partition the sums, `(b, k)` float64 on the CPU.

    Raises:
        UserError: the logits are not finite.
    """
    batch = len(windows)
    edges = [torch.as_tensor(one).expand(batch, -1).contiguous() for one in partitions]
    sums = [torch.zeros(batch, one.shape[1] - 1, dtype=torch.float64) for one in edges]
    for start, nats in _parts(model, windows, progress, overlap, rows):
        positions = torch.arange(start, start + nats.shape[1]).repeat(batch, 1)
        for total, bounds in zip(sums, edges, strict=True):
            part = torch.searchsorted(bounds, positions, right=True) - 1
            total.scatter_add_(1, part, nats)
    return sums


def _parts(
    model: LanguageModel,
    windows: Tensor,
    progress: Progress | None,
    overlap: Overlap | None,
    rows: int,
) -> Iterator[tuple[int, Tensor]]:
    """Yield the losses of windows in parts, with the position where a part begins."""
    if overlap is not None:
        yield from overlapping_losses(model, windows, overlap, rows=rows, progress=progress)
        return
    for start, nats in token_losses(model, windows):
        if progress is not None:
            progress.advance(nats.numel(), nats.numel())
        yield start, nats


def scored(row: Row, bucket: int | None = None) -> Scored:
    """Return the nats and bytes of a whole window, or of one of its buckets.

    Args:
        row: a row of `evaluate`, with the bytes of its tokens.
        bucket: index of the bucket in `edges`; None for the whole window.
    """
    if bucket is None:
        return Scored(row["nats_per_token"] * row["length"], row["bytes"])
    start, stop = edges(row["length"])[bucket : bucket + 2]
    return Scored(row["buckets"][bucket] * (stop - start), row["bucket_bytes"][bucket])


def summarise(rows: Sequence[Row]) -> tuple[Bucket, list[Bucket]]:
    """Return the mean loss over windows, of whole ones and by bucket.

    Intervals are Student's t.

    Args:
        rows: rows of `evaluate`, all of one length; each window counts once.
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
    """Return start and mean loss over rows, in nats, of stretches of `width` tokens.

    Args:
        rows: rows of `evaluate`, all of one length.
        width: a multiple of STRETCH; the remainder at the end is part of the last stretch.
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
