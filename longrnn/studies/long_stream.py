"""The loss on one long stream, compared with that of the same text at early positions."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import torch

from longrnn.errors import UserError
from longrnn.evaluation.perplexity import STRETCH, evaluate, evaluate_windows
from longrnn.evaluation.texts import Document
from longrnn.evaluation.windows import Window
from longrnn.intervals import Estimate, mean, ratio_mean
from longrnn.models import LanguageModel
from longrnn.results import Row
from longrnn.units import format_length


class Stream(NamedTuple):
    """One model on one long stream.

    Attributes:
        row: the row of `perplexity.evaluate` for the whole stream, read once.
        fresh: rows of the blocks of its last octave, each read from an empty state.
        block: tokens of a block.
    """

    row: Row
    fresh: list[Row]
    block: int


def read_stream(
    model: LanguageModel,
    document: Document,
    *,
    length: int,
    block: int,
    output: Path,
    quiet: bool = False,
) -> Stream:
    """Measure the loss by position on one stream, and on the blocks of its last octave afresh.

    A loss at late positions also depends on the text that is there. The blocks read the same text
    at early positions.

    Args:
        model: any language model.
        document: the stream, of more than `length` tokens.
        length: tokens to read, 2 · block · a power of 2.
        block: tokens of a block.
        output: the results file of the stream; that of the blocks is `STEM-fresh.jsonl`.
        quiet: show no progress.

    Raises:
        UserError: a length does not fit, or as `perplexity.evaluate`.
    """
    times = length // block
    if times * block != length or times < 2 or times & (times - 1) or block % (2 * STRETCH):
        raise UserError(
            f"a stream of {format_length(length)} tokens has no whole blocks of "
            f"{format_length(block)}: give a length of 2, 4, 8, … blocks of a multiple of "
            f"{2 * STRETCH} tokens"
        )
    whole = document._replace(tokens=document.tokens[: length + 1])
    (row,) = evaluate(model, [whole], length=length, output=output, quiet=quiet)
    starts = range(length // 2, length, block)
    wanted = [Window(whole, start // block, start, block) for start in starts]
    fresh = evaluate_windows(
        model, wanted, output=output.with_stem(f"{output.stem}-fresh"), quiet=quiet
    )
    return Stream(row, fresh, block)


def late_against_fresh(stream: Stream) -> tuple[Estimate, Estimate]:
    """Compare the last octave of a stream with the same tokens at the end of fresh blocks.

    Returns:
        The mean loss of the second halves of the blocks when they are read in the stream, over that
        in fresh blocks, with its Student-t interval over blocks; and the latter loss.
    """
    stretches = torch.tensor(stream.row["stretches"], dtype=torch.float64)
    half, late, early = stream.block // 2, [], []
    for row in stream.fresh:
        start = (row["start"] + half) // STRETCH
        late.append(float(stretches[start : start + half // STRETCH].mean()))
        early.append(row["buckets"][-1])
    return ratio_mean(late, early), mean(early)
