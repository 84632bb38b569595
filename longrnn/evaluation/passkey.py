"""Passkey retrieval over lengths × positions of the key, with greedy answers and held-out keys."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from longrnn import processes
from longrnn.data import Passkey
from longrnn.data.prompts import is_recalled, read
from longrnn.errors import UserError
from longrnn.evaluation.passkey_grid import Grid, Inserted, Question, Sample, prompts, sample_of
from longrnn.hf.opened import OpenCheckpoint
from longrnn.inference.chunk_select import select
from longrnn.inference.engine import Answer, Cost, answers, count_tokens, refuse_long
from longrnn.inference.trie import Prompt
from longrnn.intervals import Estimate, independent_stretches, proportion
from longrnn.models import LanguageModel, generate
from longrnn.progress import Progress
from longrnn.results import Results, Row
from longrnn.units import check_count, format_length


def evenly_spaced(count: int) -> list[float]:
    """Return `count` depths from 0 to 1; a single depth is 0.5."""
    if count < 1:
        raise UserError(
            f"the number of depths must be at least 1, not {count}: give a positive number"
        )
    return [0.5] if count == 1 else [round(i / (count - 1), 4) for i in range(count)]


def evaluate(
    models: Sequence[OpenCheckpoint],
    grid: Grid,
    *,
    output: Path,
    tasks: Mapping[str, Passkey] | None = None,
    chunk: int | None = None,
    naive: bool = False,
    batch_size: int = 16,
    quiet: bool = False,
) -> list[Row]:
    """Measure passkey retrieval; return the rows of the grid, new and earlier ones.

    Args:
        models: models with different names; all get the same prompts.
        grid: the prompts.
        output: the results file, which is resumed; lengths, positions and n may grow.
        tasks: the result of `tasks_of`, if it exists already.
        chunk: if set, the model answers from one chunk of this many tokens, the one after which its
            next token has the lowest entropy (see `longrnn.inference.chunk_select`).
        naive: read every prompt separately; the answers are the same up to rounding.
        batch_size: prompts in one batch.
        quiet: show no progress.

    Returns:
        One row per prompt with `model`, `length`, `depth` or `insert_at`, `index`, `key`, `said`
        (the generated answer) and `correct`; for a filler from a file also `start` (where in the
        filler the prompt begins) and `covers` (the length of the prompt), as shares of the filler.

    Raises:
        UserError: a length is too short, the logits are not finite, or `output` has the results of
            another run.
    """
    check_count("the batch size", batch_size)
    tasks = tasks_of(models, grid) if tasks is None else tasks
    wanted = _samples(tasks, grid)
    header = {
        "evaluation": "passkey",
        "models": {model.name: model.model.fingerprint() for model in models},
        "tokenizers": {model.name: model.tokenizer.fingerprint() for model in models},
        **grid.header(),
    }
    if chunk is not None:
        header["chunk_select"] = chunk
    results = Results(output, header)
    for model in models:
        task = tasks[model.name]
        done = {sample_of(row) for row in results.rows if row["model"] == model.name}
        todo = processes.share(
            [sample for sample in wanted if sample not in done],
            # Prompts with the same index begin at the same place and share keys.
            lambda sample: sample.index,
            lambda sample: (sample.index, sample.place),
        )
        questions = [sample.question(task, grid.seed, grid.n_keys) for sample in todo]
        title = f"passkey {model.name}"
        with Progress(title, len(todo), unit="tokens", quiet=quiet) as progress:
            missing = list(prompts(task, todo, questions, naive=naive))
            if chunk is None:
                found = answers(
                    model.model,
                    missing,
                    max_new_tokens=_longest_answer(task, questions),
                    batch_size=batch_size,
                    progress=progress,
                )
            else:
                found = _by_chunk(model.model, task, missing, questions, chunk, progress)
            for batch in found:
                results.append(
                    _row(model.name, task, todo[index], questions[index], ids)
                    for index, ids in batch
                )
                lengths_done = {format_length(todo[index].length) for index, _ in batch}
                progress.advance(len(batch), 0, f"at {', '.join(lengths_done)}")
    results.collect()
    rows = {(row["model"], sample_of(row)): row for row in results.rows}
    return [rows[model.name, sample] for model in models for sample in wanted]


def refuse_out_of_reach(
    models: Sequence[OpenCheckpoint],
    grid: Grid,
    *,
    tasks: Mapping[str, Passkey] | None = None,
    chunk: int | None = None,
) -> None:
    """Refuse a grid whose longest prompt with its answer exceeds a model's maximum length.

    With `chunk`, a model reads at most header, chunk and question at once.

    Raises:
        UserError: with the maximum length, or as `evaluate`.
    """
    tasks = tasks_of(models, grid) if tasks is None else tasks
    samples = _samples(tasks, grid)
    for model in models:
        task = tasks[model.name]
        questions = [sample.question(task, grid.seed, grid.n_keys) for sample in samples]
        longest = max(grid.lengths)
        if chunk is not None:
            n_question = max((len(task.question(one.needle)) for one in questions), default=1)
            longest = min(longest, task.n_header + chunk + n_question)
        refuse_long(model.model, longest + _longest_answer(task, questions))


def cost(
    models: Sequence[OpenCheckpoint], grid: Grid, *, tasks: Mapping[str, Passkey] | None = None
) -> dict[str, Cost]:
    """Count the tokens that each model would read for a grid, with shared prefixes and without.

    Raises:
        UserError: as `evaluate` does.
    """
    tasks = tasks_of(models, grid) if tasks is None else tasks
    samples = _samples(tasks, grid)
    found = {}
    for name, task in tasks.items():
        questions = [sample.question(task, grid.seed, grid.n_keys) for sample in samples]
        found[name] = count_tokens(
            list(prompts(task, samples, questions, naive=False)),
            max_new_tokens=_longest_answer(task, questions),
        )
    return found


def tasks_of(models: Sequence[OpenCheckpoint], grid: Grid) -> dict[str, Passkey]:
    """Build the task with each model's tokenizer, by the model's name.

    Raises:
        UserError: the grid is out of range, a length is too short, or a tokenizer does not fit its
            model.
    """
    grid.check()
    files = None if grid.filler is None else [str(grid.filler)]
    tasks = {}
    for model in models:
        model.refuse_unfit()
        task = Passkey(model.tokenizer, filler=files, n_keys=grid.n_keys)
        least = task.least_length()
        if min(grid.lengths) < least:
            raise UserError(
                f"length {min(grid.lengths)} is too short for the passkey prompt: "
                f"the least is {least} tokens with the tokenizer of {model.name}; give that or more"
            )
        tasks[model.name] = task
    return tasks


def _samples(tasks: Mapping[str, Passkey], grid: Grid) -> list[Sample | Inserted]:
    """Return the samples of a grid for which the tokenizers of all models leave enough room."""
    return grid.samples(max(task.least_length() for task in tasks.values()))


def _longest_answer(task: Passkey, questions: Sequence[Question]) -> int:
    return max((len(task.answer(question.needle)) for question in questions), default=1)


def _by_chunk(
    model: LanguageModel,
    task: Passkey,
    prompts: Sequence[Prompt],
    questions: Sequence[Question],
    chunk: int,
    progress: Progress,
) -> Iterator[list[Answer]]:
    """Yield one answer at a time, each from the chunk that was selected for it."""
    for index, (prompt, question) in enumerate(zip(prompts, questions, strict=True)):
        header, *rest = prompt.context
        text = read(rest)
        chosen = select(model, text, prompt.question, chunk=chunk, prefix=read([header]))
        progress.advance(0, header.size + len(text) + len(prompt.question))
        ids = prompt.question[None].to(chosen.state.position.device)
        longest = len(task.answer(question.needle))
        generated = generate(model, ids, chosen.state, max_new_tokens=longest)
        yield [Answer(index, generated.tokens[0])]


def _row(
    name: str,
    task: Passkey,
    sample: Sample | Inserted,
    question: Question,
    ids: list[int],
) -> Row:
    key = question.needle.key
    answer = task.tokenizer.decode(ids).strip()
    correct = is_recalled(answer, key)
    row = {"model": name, **asdict(sample), "key": key, "said": answer, "correct": correct}
    if task.own_filler:
        row |= {"start": question.start, "covers": sample.length / task.n_filler}
    return row


def by_model(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """Group rows by the model's name, in the order of their first appearance."""
    split: dict[str, list[Row]] = {}
    for row in rows:
        split.setdefault(row["model"], []).append(row)
    return split


def independent(rows: Sequence[Row]) -> float | None:
    """Return how many of the prompts of one length count as independent; None for all of them.

    Prompts that read overlapping parts of a text file are not independent samples of such texts,
    see `independent_stretches`. With the built-in filler, all prompts have the same text and only
    the key is sampled.
    """
    if "covers" not in rows[0]:
        return None
    return independent_stretches([row["start"] for row in rows], rows[0]["covers"])


def summarise(rows: Sequence[Row]) -> dict[tuple[int, float | None], Estimate]:
    """Return the accuracy of one model by (length, depth); depth None stands for all depths.

    Intervals are Wilson's, with the number of prompts that `independent` returns.
    """
    return _accuracy(rows, "depth")


def summarise_inserted(rows: Sequence[Row]) -> dict[tuple[int, int | None], Estimate]:
    """Return the accuracy of one model by (length, insertion point); None stands for all points."""
    return _accuracy(rows, "insert_at")


def _accuracy(rows: Sequence[Row], place: str) -> dict[tuple[int, Any], Estimate]:
    cells: dict[tuple[int, Any], list[Row]] = {}
    for row in rows:
        for where in (row[place], None):
            cells.setdefault((row["length"], where), []).append(row)
    return {
        cell: proportion(sum(row["correct"] for row in own), len(own), independent(own))
        for cell, own in cells.items()
    }
