"""Evaluates tasks of random sequences, such as reversing, on held-out sequences."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from longrnn import processes
from longrnn.data import TASKS, SequenceTask
from longrnn.errors import UserError
from longrnn.intervals import Estimate, mean, proportion, share_or_mean
from longrnn.models import LanguageModel
from longrnn.models.finite import refuse_nonfinite
from longrnn.progress import Progress
from longrnn.results import Results, Row

# Default number of sequences, if there are as many held-out ones.
MAX_SEQUENCES = 1024


@torch.no_grad()
def evaluate(
    model: LanguageModel,
    task: SequenceTask,
    *,
    length: int,
    n: int | None = None,
    output: Path,
    batch_size: int = 64,
    quiet: bool = False,
) -> list[Row]:
    """Measure a sequence task; return all rows, new and earlier ones.

    Args:
        model: any language model with at least as many ids as the task.
        task: defines the vocabulary and the held-out sequences.
        length: length of the sequences, as in `Task.sample`.
        n: number of held-out sequences; None for all of them, at most MAX_SEQUENCES.
        output: the results file, which is resumed.
        batch_size: sequences in one batch.
        quiet: show no progress.

    Returns:
        One row per sequence with `index`, `token_accuracy`, `exact_match`, `edit_distance`, and
        `condition` if the task has conditions.

    Raises:
        UserError: sizes that do not fit, or `output` has the results of another run.
    """
    kind = kind_of(task)
    if model.vocab_size < task.vocab_size:
        raise UserError(
            f"{kind} with vocab_size {task.n_tokens} needs a model with {task.vocab_size} ids, "
            f"this one has {model.vocab_size}: give the vocab_size it was trained with"
        )
    n = min(task.n_held_out, MAX_SEQUENCES) if n is None else n
    if not 1 <= n <= task.n_held_out:
        raise UserError(
            f"n must be between 1 and the {task.n_held_out} held-out sequences: give a smaller one"
        )
    task.evaluation_batch(0, 1, length=length)  # refuses an invalid length
    header = {
        "evaluation": kind,
        "model": model.fingerprint(),
        "length": length,
        **task.options(),
    }
    results = Results(output, header)
    done = {row["index"] for row in results.rows}
    todo = [index for index in range(n) if index not in done]
    most = processes.batch_size(len(todo), batch_size)
    own = processes.share(list(_runs(todo, most)))
    total = sum(stop - start for start, stop in own)
    with Progress(kind, total, unit="tokens", quiet=quiet) as progress:
        for start, stop in own:
            batch = task.evaluation_batch(start, stop, length=length)
            state = model.init_state(stop - start)
            tokens = batch.tokens.to(state.position.device)
            logits = model(tokens, state).logits
            refuse_nonfinite(logits, model, tokens, state)
            predictions = logits.argmax(-1).cpu()
            scores = {name: v.tolist() for name, v in task.score(predictions, batch).items()}
            results.append(
                {
                    "index": start + i,
                    **_condition(task, start + i),
                    **{name: values[i] for name, values in scores.items()},
                }
                for i in range(stop - start)
            )
            progress.advance(stop - start, tokens.numel())
    results.collect()
    rows = {row["index"]: row for row in results.rows}
    return [rows[index] for index in range(n)]


def _runs(indices: Sequence[int], most: int) -> Iterator[tuple[int, int]]:
    """Yield start and stop of runs of consecutive indices, each of at most `most`."""
    start = 0
    for place in range(1, len(indices) + 1):
        ends = place == len(indices) or indices[place] != indices[place - 1] + 1
        if ends or place - start == most:
            yield indices[start], indices[place - 1] + 1
            start = place


def summarise(rows: Sequence[Row]) -> dict[str, Estimate]:
    """Return mean token accuracy and edit distance (Student's t) and exact matches (Wilson).

    Token accuracies that are all 0 or 1 are a share with Wilson's interval too. If the task has
    conditions, the share of exact matches under each is included.
    """
    found = {
        "token_accuracy": share_or_mean([row["token_accuracy"] for row in rows]),
        "exact_match": _exact(rows),
        "edit_distance": mean([row["edit_distance"] for row in rows]),
    }
    for condition in dict.fromkeys(row["condition"] for row in rows if "condition" in row):
        found[condition] = _exact([row for row in rows if row["condition"] == condition])
    return found


def kind_of(task: SequenceTask) -> str:
    """Return the name under which a task is registered."""
    return next(kind for kind, member in TASKS.items() if type(task) is member)


def _condition(task: SequenceTask, index: int) -> Row:
    condition = task.condition(index)
    return {} if condition is None else {"condition": condition}


def _exact(rows: Sequence[Row]) -> Estimate:
    return proportion(sum(row["exact_match"] == 1 for row in rows), len(rows))
