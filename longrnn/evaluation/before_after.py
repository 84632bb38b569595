"""Evaluation of a fine-tuned model beside the checkpoint that it started from.

Both read the same held-out data and prompts. After training on text, the loss is measured by
position up to a multiple of the training length, in windows of several documents, and passkeys are
queried, unless neither model recalls one at the shortest length. After training on prompts and
answers, it is the loss of the answers and whether they are exactly right. The suite and its text
are written into a folder, so that `longrnn compare` can repeat the evaluation with further models.
"""

import logging
import math
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from longrnn.checkpoints.opened import OpenCheckpoint
from longrnn.data import Instruct, Passkey, Task, Text
from longrnn.data.stream import Corpus
from longrnn.errors import UserError
from longrnn.evaluation.base import Evaluation
from longrnn.evaluation.passkey import PasskeyRetrieval
from longrnn.evaluation.run import build_evaluation, read_suite, run
from longrnn.files import write_atomic
from longrnn.text import Tokenizer
from longrnn.units import format_length
from longrnn.yaml import yaml_text

logger = logging.getLogger(__name__)

# The longest evaluation, as a multiple of the training length.
EVALUATED_MULTIPLE = 16
# Windows of text that are read if there are this many; intervals of fewer than FITTING_WINDOWS are
# too wide to be useful.
MOST_WINDOWS, FITTING_WINDOWS = 16, 5
# Passkeys of each length and depth.
PROMPTS = 10
# The names of the suite and of the text.
SUITE, TEXT = "before_after.yaml", "held_out.txt"


def write_suite(
    task: Task, tokenizer: Tokenizer, folder: Path, *, length: int, longest: int | None = None
) -> list[Evaluation[Any]]:
    """Write the suite of an evaluation with its text, and return its evaluations.

    Args:
        task: the validation of the run, whose documents are held out.
        tokenizer: of the model.
        folder: of the evaluation.
        length: on which the model was trained, in tokens.
        longest: tokens of the longest evaluation, at least `length`; by default
            `EVALUATED_MULTIPLE` times it.

    Raises:
        UserError: there is nothing to evaluate at these lengths.
    """
    longest = longest or EVALUATED_MULTIPLE * length
    lengths = [length * 2**k for k in range(longest.bit_length()) if length * 2**k <= longest]
    evaluations: list[dict[str, Any]] = []
    if isinstance(task, Instruct):
        data = str(task.corpus.folder)
        evaluations.append({"kind": "answers", "data": data, "part": task.corpus.part})
        logger.warning("the data has answers: the evaluation leaves passkeys out")
    elif isinstance(task, Text):
        text = held_out_text(task.corpus, tokenizer, lengths[-1])
        tokens = len(tokenizer.encode(text)) - 1  # the last is only predicted
        fitting = [n for n in lengths if tokens >= FITTING_WINDOWS * n]
        if not fitting and tokens >= length:
            fitting = [length]
        if fitting != lengths:
            logger.warning(
                f"the held-out text has {tokens:,} tokens, too few for the loss at "
                f"{format_length(longest)}: give more with --validation"
            )
        if fitting:
            write_atomic(folder / TEXT, text)
            what = {"texts": [str(folder / TEXT)], "lengths": fitting, "windows": MOST_WINDOWS}
            evaluations.append({"kind": "perplexity", **what})
    least = math.inf if isinstance(task, Instruct) else Passkey(tokenizer).least_length()
    prompts = [n for n in lengths if n >= least]
    if len(prompts) > 2:  # every second, with the longest
        prompts = prompts[(len(prompts) - 1) % 2 :: 2]
    if prompts:
        evaluations.append({"kind": "passkey", "lengths": prompts, "n": PROMPTS})
    if not evaluations:
        raise UserError(
            f"the held-out text is too short for the loss at {format_length(length)}: give more "
            "with --validation, or add --no-evaluate"
        )
    write_atomic(folder / SUITE, yaml_text({"evaluations": evaluations}))
    return read_suite(str(folder / SUITE))


def without_failed_passkeys(
    models: Sequence[OpenCheckpoint], evaluations: Sequence[Evaluation[Any]], folder: Path
) -> list[Evaluation[Any]]:
    """Return evaluations without passkeys that no model recalls, which a warning names.

    Args:
        models: to evaluate.
        evaluations: of `write_suite`.
        folder: of the evaluation, which keeps what is measured here.
    """
    kept = []
    for evaluation in evaluations:
        if isinstance(evaluation, PasskeyRetrieval) and len(evaluations) > 1:
            shortest = evaluation.options.lengths[0]
            spec = {"kind": evaluation.kind, "lengths": [shortest], "n": evaluation.options.n}
            asked, answers = build_evaluation(spec), []
            if any(plan.items for plan in asked.plan(models)):
                (outcome,) = run(models, [asked], folder)
                answers = [result for results in outcome.results.values() for _, result in results]
            if not any(result["correct"] for result in answers):
                logger.warning(
                    f"no passkey is recalled at {format_length(shortest)}: the evaluation leaves "
                    "passkeys out"
                )
                continue
        kept.append(evaluation)
    return kept


def held_out_text(corpus: Corpus, tokenizer: Tokenizer, length: int) -> str:
    """Return a text of at most `MOST_WINDOWS` windows, from as many documents as possible.

    It has the beginnings of all documents, each as long as a window at most, the longest first; if
    that is not enough, what follows them.

    Args:
        corpus: the held-out documents.
        tokenizer: of the documents.
        length: tokens of a window.
    """
    order, left = np.argsort(-corpus.lengths, kind="stable").tolist(), MOST_WINDOWS * length
    parts = []
    for start, document in product(range(0, int(corpus.lengths.max()), length), order):
        stop = min(start + length, int(corpus.lengths[document]))
        if start < stop and left > 0:
            first = corpus.spans[document, 0]
            ids = corpus.tokens[first + start : first + stop].tolist()
            parts.append(tokenizer.decode(ids[int(ids[0] == tokenizer.bos_id) :]))
            left -= stop - start
    # A character may be cut at either end.
    return "\n\n".join(part.strip("\ufffd") for part in parts)
