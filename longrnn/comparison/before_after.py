"""Evaluation of a fine-tuned model beside the checkpoint that it started from.

Both read the same held-out texts and prompts: loss by position up to a multiple of the training
length, and passkey retrieval. The suite and the texts are written into a folder, so that `longrnn
compare` can repeat the evaluation with further models.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from longrnn.comparison.suites import Suite, read_suite
from longrnn.files import write_atomic
from longrnn.tasks.passkey import Passkey
from longrnn.text import Tokenizer

# The longest evaluation, as a multiple of the training length.
BEYOND = 16
# Texts that are read, and the factor between the lengths of the columns.
MOST_TEXTS, STEP = 8, 2
DEPTHS, PROMPTS = [0.0, 0.5, 1.0], 5
# The name of the suite, and the folder of the texts.
SUITE, TEXTS = "before_after.yaml", "texts"


def write_suite(
    documents: Any, tokenizer: Tokenizer, folder: Path, *, length: int, longest: int | None = None
) -> Suite:
    """Writes the suite of an evaluation with its texts, and returns it.

    Args:
        documents: held-out documents, see `longrnn.tasks.documents.Documents`.
        tokenizer: of the model.
        folder: of the evaluation.
        length: on which the model was trained, in tokens.
        longest: tokens of the longest evaluation; by default `BEYOND` times `length`.
    """
    longest = longest or BEYOND * length
    lengths = [length]
    while lengths[-1] * STEP <= longest:
        lengths.append(lengths[-1] * STEP)
    evaluations: list[dict[str, Any]] = []
    total = int(documents.lengths.sum())
    fitting = [one for one in lengths if _with_margin(one) <= total]
    if fitting:
        texts = held_out_texts(documents, tokenizer, fitting[-1])
        names = []
        for number, text in enumerate(texts):
            path = folder / TEXTS / f"{number}.txt"
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomic(path, text)
            names.append(str(path))
        evaluations.append(
            {
                "kind": "perplexity",
                "texts": names,
                "lengths": [str(one) for one in fitting],
                "windows": 1,
            }
        )
    least = Passkey(tokenizer).least_length()
    prompts = [str(one) for one in lengths[:: 2 if len(lengths) > 2 else 1] if one >= least]
    if prompts:
        evaluations.append({"kind": "passkey", "lengths": prompts, "depths": DEPTHS, "n": PROMPTS})
    folder.mkdir(parents=True, exist_ok=True)
    write_atomic(folder / SUITE, yaml.safe_dump({"evaluations": evaluations}, sort_keys=False))
    return read_suite(str(folder / SUITE))


def held_out_texts(documents: Any, tokenizer: Tokenizer, length: int) -> list[str]:
    """Returns texts of `length` tokens or slightly more, of which there are enough.

    Long documents give one text each, from their beginning. Where none is so long, documents are
    joined by blank lines.
    """
    wanted = _with_margin(length)
    order = np.argsort(-documents.lengths, kind="stable").tolist()
    long = [one for one in order if documents.lengths[one] >= wanted]
    if long:
        pieces = [[(one, wanted)] for one in long[:MOST_TEXTS]]
    else:
        pieces = list(_joined(documents, order, wanted))[:MOST_TEXTS]
    return [
        "\n\n".join(
            # A character may be cut at the end.
            tokenizer.decode(documents.read(one, 0, size).tolist()).rstrip("\ufffd")
            for one, size in parts
        )
        for parts in pieces
    ]


def _joined(documents: Any, order: list[int], wanted: int) -> Iterator[list[tuple[int, int]]]:
    """Yields documents that have `wanted` tokens together, with the tokens of each."""
    parts: list[tuple[int, int]] = []
    for one in order:
        parts.append((one, int(documents.lengths[one])))
        if sum(size for _, size in parts) >= wanted:
            yield parts
            parts = []


def _with_margin(length: int) -> int:
    """Tokens of a text that has at least `length` + 1 when it is tokenized again."""
    return length + length // 64 + 16
