"""The loss by position beyond the training length, and the loss inside it on more text.

The first positions of a few long windows are few tokens: eight windows have 512 tokens inside a
training length of 64. The loss inside the training length is therefore measured on windows of that
length.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from longrnn.evaluation.perplexity import evaluate as evaluate_loss
from longrnn.evaluation.texts import Document
from longrnn.models import LanguageModel
from longrnn.results import Row

# Tokens of each document that are read in windows of the training length, and windows in a batch.
INSIDE_TOKENS = 2**15
INSIDE_BATCH = 256


class Losses(NamedTuple):
    """Rows of `perplexity.evaluate`.

    Attributes:
        long: of windows beyond the training length.
        inside: of windows of the training length.
    """

    long: list[Row]
    inside: list[Row]


def evaluate(
    model: LanguageModel,
    documents: Sequence[Document],
    *,
    train_length: int,
    length: int,
    output: Path,
    quiet: bool = False,
) -> Losses:
    """Measure the loss by position in long windows, and in windows of the training length.

    Args:
        model: any language model.
        documents: the texts; of each, the first INSIDE_TOKENS tokens are read in short windows.
        train_length: tokens of a short window.
        length: tokens of a long window.
        output: the results file of the long windows; that of the others is `STEM-inside.jsonl`.
        quiet: show no progress.

    Raises:
        UserError: as `perplexity.evaluate`.
    """
    long = evaluate_loss(model, documents, length=length, output=output, quiet=quiet)
    inside = evaluate_loss(
        model,
        beginnings(documents, INSIDE_TOKENS),
        length=train_length,
        output=output.with_stem(f"{output.stem}-inside"),
        batch_size=INSIDE_BATCH,
        quiet=quiet,
    )
    return Losses(long, inside)


def beginnings(documents: Sequence[Document], n_tokens: int) -> list[Document]:
    """Return the documents, cut where their first `n_tokens` tokens are predicted."""
    return [one._replace(tokens=one.tokens[: n_tokens + 1]) for one in documents]
