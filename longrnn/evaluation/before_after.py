"""Evaluation of a fine-tuned model beside the checkpoint that it started from.

Both read the same held-out data and prompts. After training on text, the loss is measured by
position up to a multiple of the training length, in windows of several documents; after training on
prompts and answers, the loss of the answers and whether they are exactly right. Both are asked for
passkeys too. The suite and its texts are written into a folder, so that `longrnn compare` can
repeat the evaluation with further models.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import yaml
from numpy.typing import NDArray

from longrnn.data import Instruct, Passkey, Task, Text
from longrnn.data.stream import Documents
from longrnn.evaluation.suites import Suite, read_suite
from longrnn.files import write_atomic
from longrnn.text import Tokenizer
from longrnn.units import format_length

logger = logging.getLogger(__name__)

# The longest evaluation, as a multiple of the training length, and the factor between two lengths.
BEYOND, STEP = 16, 2
# Windows of text that are read if there are so many; fewer than LEAST have no useful interval.
MOST, LEAST = 16, 5
# Passkeys of each length.
DEPTHS, PROMPTS = [0.0, 0.25, 0.5, 0.75, 1.0], 10
# The name of the suite, and the folder of the texts.
SUITE, TEXTS = "before_after.yaml", "texts"


class Span(NamedTuple):
    """`size` tokens of a document from `start` on."""

    document: int
    start: int
    size: int


def write_suite(
    task: Task, tokenizer: Tokenizer, folder: Path, *, length: int, longest: int | None = None
) -> Suite:
    """Writes the suite of an evaluation with its texts, and returns it.

    Args:
        task: the validation of the run, whose documents are held out.
        tokenizer: of the model.
        folder: of the evaluation.
        length: on which the model was trained, in tokens.
        longest: tokens of the longest evaluation; by default `BEYOND` times `length`.

    Raises:
        UserError: there is nothing to evaluate at these lengths.
    """
    longest = longest or BEYOND * length
    lengths = [length]
    while lengths[-1] * STEP <= longest:
        lengths.append(lengths[-1] * STEP)
    evaluations: list[dict[str, Any]] = []
    if isinstance(task, Instruct):
        of = task.documents
        data = {"data": str(of.corpus.folder), "part": of.part}
        evaluations.append({"kind": "answers", **data})
    elif isinstance(task, Text) and (fitting := _fitting(task.documents.lengths, lengths)):
        if fitting[-1] < lengths[-1]:
            logger.warning(
                f"the held-out documents have {int(task.documents.lengths.sum()):,} tokens: the "
                f"loss is measured up to {format_length(fitting[-1])}; give more with --validation"
            )
        texts = held_out_texts(task.documents, tokenizer, fitting[-1])
        paths = [folder / TEXTS / f"{number}.txt" for number in range(len(texts))]
        for path, text in zip(paths, texts, strict=True):
            write_atomic(path, text)
        evaluations.append(
            {
                "kind": "perplexity",
                "texts": [*map(str, paths)],
                "lengths": [*map(str, fitting)],
                "windows": 1,  # per file
            }
        )
    least = Passkey(tokenizer).least_length()
    prompts = [str(one) for one in lengths[:: 2 if len(lengths) > 2 else 1] if one >= least]
    if prompts:
        evaluations.append({"kind": "passkey", "lengths": prompts, "depths": DEPTHS, "n": PROMPTS})
    write_atomic(folder / SUITE, yaml.safe_dump({"evaluations": evaluations}, sort_keys=False))
    return read_suite(str(folder / SUITE))


def held_out_texts(documents: Documents, tokenizer: Tokenizer, length: int) -> list[str]:
    """Returns at most `MOST` different texts of `length` tokens or slightly more.

    Args:
        documents: see `longrnn.data.stream.Documents`.
        tokenizer: of the documents.
        length: tokens that each text has at least, when it is tokenized again.
    """
    texts = [
        "\n\n".join(
            # A character may be cut at either end.
            tokenizer.decode(documents.read(one, start, start + size).tolist()).strip("\ufffd")
            for one, start, size in spans
        )
        for spans in _windows(documents.lengths, length)
    ]
    return list(dict.fromkeys(texts))


def _fitting(sizes: NDArray[np.int64], lengths: list[int]) -> list[int]:
    """The lengths of which documents of these sizes have `LEAST` windows, or any of the first."""
    counts = {length: len(_windows(sizes, length)) for length in lengths}
    return [one for one in lengths if counts[one] >= LEAST] or lengths[: min(1, counts[lengths[0]])]


def _windows(sizes: NDArray[np.int64], length: int) -> list[list[Span]]:
    """At most `MOST` windows of documents, of as many documents as possible.

    Documents that are shorter than a window are joined, the longest first.
    """
    wanted = _with_margin(length)
    found: list[tuple[int, list[Span]]] = []
    joined: list[Span] = []
    firsts = 0
    for document in np.argsort(-sizes, kind="stable").tolist():
        size = int(sizes[document])
        if size >= wanted:
            starts = range(0, size - wanted + 1, wanted)
            found += [(start, [Span(document, start, wanted)]) for start in starts[:MOST]]
            firsts += 1
        else:
            joined.append(Span(document, 0, size))
            if sum(span.size for span in joined) >= wanted:
                found.append((0, joined))
                joined, firsts = [], firsts + 1
        if firsts == MOST:
            break
    found.sort(key=lambda pair: pair[0])  # the first windows of all documents come first
    return [spans for _, spans in found[:MOST]]


def _with_margin(length: int) -> int:
    """Tokens of a text that has at least `length` + 1 when it is tokenized again."""
    return length + length // 64 + 16
