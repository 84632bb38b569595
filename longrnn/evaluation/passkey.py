"""Passkey retrieval over lengths × depths: greedy answers to held-out keys."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import NamedTuple

from longrnn.errors import UserError
from longrnn.evaluation.intervals import Estimate, proportion
from longrnn.evaluation.prefix import Answer, Prompt, answers
from longrnn.evaluation.results import Results, Row
from longrnn.mitigations.chunk_select import select
from longrnn.models import LanguageModel, generate
from longrnn.progress import Progress
from longrnn.tasks.passkey import Passkey
from longrnn.tasks.passkey_documents import Needle, draw_needles, keys
from longrnn.tasks.spans import read
from longrnn.text import Tokenizer, read_text
from longrnn.units import format_length


class Subject(NamedTuple):
    """A model to measure, with its tokenizer and the name that its rows carry."""

    name: str
    model: LanguageModel
    tokenizer: Tokenizer


class Question(NamedTuple):
    """What a prompt is about: its keys, which one is asked, and where in the filler it begins."""

    needles: list[Needle]
    asked: int
    start: float

    @property
    def needle(self) -> Needle:
        """The one that is asked."""
        return self.needles[self.asked]


@dataclass(frozen=True)
class Sample:
    """One prompt: the `index`-th of its cell."""

    length: int
    depth: float
    index: int

    def question(self, seed: int, n_keys: int) -> Question:
        """Its keys, which training never sees; the one that is asked is at `depth`."""
        # The same at every length, so that a longer prompt goes on from a shorter one.
        rng = random.Random(f"{seed}/{self.depth}/{self.index}")
        start = random.Random(f"{seed}/{self.index}").random()
        if n_keys == 1:
            return Question([Needle(rng.choice(keys(True)), self.depth)], 0, start)
        needles = draw_needles(rng, n_keys, held_out=True)
        asked = rng.randrange(n_keys)
        needles[asked] = needles[asked]._replace(depth=self.depth)
        return Question(needles, asked, start)


def evenly_spaced(count: int) -> list[float]:
    """`count` depths from 0 to 1; one depth is the middle."""
    if count < 1:
        raise UserError(f"the number of depths must be at least 1, not {count}")
    return [0.5] if count == 1 else [round(i / (count - 1), 4) for i in range(count)]


def evaluate(
    subjects: Sequence[Subject],
    *,
    lengths: Sequence[int],
    depths: Sequence[float],
    n: int,
    output: Path,
    seed: int = 0,
    filler: Path | None = None,
    n_keys: int = 1,
    chunk: int | None = None,
    naive: bool = False,
    batch_size: int = 16,
    quiet: bool = False,
) -> list[Row]:
    """Measures passkey retrieval and returns its rows, new and earlier ones.

    Args:
        subjects: the models, asked the same questions.
        lengths: tokens of the prompts, exactly.
        depths: where the key stands in the filler, from 0 to 1.
        n: prompts per cell.
        output: the results file, taken up where it was left; lengths, depths and n may grow.
        seed: of the keys.
        filler: a text file to hide the keys in, each prompt beginning at another place of it; None
            for the sentences that everyone uses.
        n_keys: keys in one prompt, numbered, of which one is asked.
        chunk: where set, the model answers from the one chunk of so many tokens that it is surest
            about (see `longrnn.mitigations.chunk_select`).
        naive: read every prompt by itself; the answers are the same, to rounding.
        batch_size: prompts in one batch.
        quiet: no progress.

    Returns:
        Rows with `model`, `length`, `depth`, `index`, `key`, `said`, `correct`, of the cells asked.

    Raises:
        UserError: a length too short, or a results file of another run.
    """
    if n < 1 or batch_size < 1:
        raise UserError("n and the batch size must be at least 1")
    if not all(0 <= depth <= 1 for depth in depths):
        raise UserError("depths lie between 0 (the start of the filler) and 1 (its end)")
    tasks = {
        subject.name: _fitting_task(subject, min(lengths), filler, n_keys) for subject in subjects
    }
    fingerprints = {subject.name: subject.model.fingerprint() for subject in subjects}
    header = {"evaluation": "passkey", "models": fingerprints, "seed": seed}
    if n_keys > 1:
        header["n_keys"] = n_keys
    if chunk is not None:
        header["chunk_select"] = chunk
    if filler is not None:
        header["filler"] = read_text(filler)[1]
    results = Results(output, header)
    cells = product(lengths, map(float, depths), range(n))
    wanted = list(dict.fromkeys(Sample(*cell) for cell in cells))
    for subject in subjects:
        task = tasks[subject.name]
        done = {_sample(row) for row in results.rows if row["model"] == subject.name}
        todo = [sample for sample in wanted if sample not in done]
        asked = [sample.question(seed, n_keys) for sample in todo]
        title = f"passkey {subject.name}"
        with Progress(title, len(todo), unit="tokens", quiet=quiet) as progress:
            prompts = [
                _prompt(task, sample, question, index if naive else None)
                for index, (sample, question) in enumerate(zip(todo, asked, strict=True))
            ]
            if chunk is None:
                found = answers(
                    subject.model,
                    prompts,
                    max_new_tokens=max((len(task.answer(q.needle)) for q in asked), default=1),
                    batch_size=batch_size,
                    progress=progress,
                )
            else:
                found = _by_chunk(subject.model, task, prompts, asked, chunk, progress)
            for batch in found:
                results.append(
                    _row(subject, task, todo[index], asked[index], ids) for index, ids in batch
                )
                lengths_done = {format_length(todo[index].length) for index, _ in batch}
                progress.advance(len(batch), 0, f"at {', '.join(lengths_done)}")
    rows = {(row["model"], _sample(row)): row for row in results.rows}
    return [rows[subject.name, sample] for subject in subjects for sample in wanted]


def _fitting_task(subject: Subject, shortest: int, filler: Path | None, n_keys: int) -> Passkey:
    """The task with a subject's tokenizer, if both fit the model and the shortest length."""
    files = None if filler is None else [str(filler)]
    task = Passkey(subject.tokenizer, filler=files, n_keys=n_keys)
    least = task.least_length()
    if shortest < least:
        raise UserError(
            f"length {shortest} is too short for the passkey prompt: "
            f"the least is {least} tokens with the tokenizer of {subject.name}"
        )
    if task.vocab_size > subject.model.vocab_size:
        raise UserError(
            f"the tokenizer of {subject.name} has {task.vocab_size} ids and the model "
            f"{subject.model.vocab_size}: use the tokenizer that the model was trained with"
        )
    return task


def _sample(row: Row) -> Sample:
    return Sample(row["length"], row["depth"], row["index"])


def _prompt(task: Passkey, sample: Sample, question: Question, alone: int | None) -> Prompt:
    """What is asked; `alone` is its number where it shall share nothing with others."""
    start = int(question.start * task.n_filler) if task.own_filler else 0
    needles, asked = question.needles, question.asked
    context = task.context(needles, asked, length=sample.length, start=start)
    ids = task.question(question.needle)
    if alone is not None:
        return Prompt(context, ids, None, 0, alone)
    # Header and filler, up to the first key line. Longer texts about one key go on in one branch;
    # with several, what follows the first differs with the length.
    fork = context[0].size + context[1].size
    branch = needles[0].key if len(needles) == 1 else sample
    return Prompt(context, ids, start, fork, branch)


def _by_chunk(
    model: LanguageModel,
    task: Passkey,
    prompts: Sequence[Prompt],
    asked: Sequence[Question],
    chunk: int,
    progress: Progress,
) -> Iterator[list[Answer]]:
    """Answers from the chunk that is chosen, one after another."""
    for index, (prompt, question) in enumerate(zip(prompts, asked, strict=True)):
        header, *rest = prompt.context
        text = read(rest)
        chosen = select(model, text, prompt.question, chunk=chunk, prefix=read([header]))
        progress.advance(0, header.size + len(text) + len(prompt.question))
        ids = prompt.question[None].to(chosen.state.position.device)
        longest = len(task.answer(question.needle))
        said = generate(model, ids, chosen.state, max_new_tokens=longest)
        yield [Answer(index, said.tokens[0])]


def _row(
    subject: Subject, task: Passkey, sample: Sample, question: Question, ids: list[int]
) -> Row:
    key = question.needle.key
    said = task.tokenizer.decode(ids).strip()
    correct = said[: len(key)] == key
    return {
        "model": subject.name, **asdict(sample), "key": key, "said": said, "correct": correct
    }  # fmt: skip


def by_model(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """Rows by the model's name, in the order of their first appearance."""
    split: dict[str, list[Row]] = {}
    for row in rows:
        split.setdefault(row["model"], []).append(row)
    return split


def summarise(rows: Sequence[Row]) -> dict[tuple[int, float | None], Estimate]:
    """Accuracy of one model by (length, depth); depth None stands for all depths together."""
    cells: dict[tuple[int, float | None], list[bool]] = {}
    for row in rows:
        for depth in (row["depth"], None):
            cells.setdefault((row["length"], depth), []).append(row["correct"])
    return {cell: proportion(sum(right), len(right)) for cell, right in cells.items()}
