"""Passkey retrieval over lengths × depths: greedy answers to held-out keys."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from longrnn.errors import UserError
from longrnn.evaluation.intervals import Estimate, proportion
from longrnn.evaluation.results import Results, Row
from longrnn.mitigations.chunk_select import select
from longrnn.models import LanguageModel, generate
from longrnn.progress import Progress
from longrnn.tasks.passkey import Passkey
from longrnn.tasks.passkey_documents import Needle, draw_needles, keys
from longrnn.text import Tokenizer, read_text
from longrnn.units import format_length

# A prompt is fed in pieces of so many tokens, so that progress shows within a long one.
PIECE = 16384


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
        rng = random.Random(f"{seed}/{self.length}/{self.depth}/{self.index}")
        if n_keys == 1:
            return Question([Needle(rng.choice(keys(True)), self.depth)], 0, rng.random())
        needles = draw_needles(rng, n_keys, held_out=True)
        asked = rng.randrange(n_keys)
        needles[asked] = needles[asked]._replace(depth=self.depth)
        return Question(needles, asked, rng.random())


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
        batch_size: prompts of one length in one batch.
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
        done = {_sample(row) for row in results.rows if row["model"] == subject.name}
        todo = [sample for sample in wanted if sample not in done]
        title = f"passkey {subject.name}"
        with Progress(title, len(todo), unit="tokens", quiet=quiet) as progress:
            for batch in _batches(todo, batch_size):
                task = tasks[subject.name]
                asked = [sample.question(seed, n_keys) for sample in batch]
                prompts = [
                    task.prompt_of(
                        question.needles,
                        question.asked,
                        length=sample.length,
                        start=int(question.start * task.n_filler) if filler is not None else 0,
                    )
                    for sample, question in zip(batch, asked, strict=True)
                ]
                longest = max(len(task.answer(question.needle)) for question in asked)
                if chunk is None:
                    ids = _answers(subject.model, torch.stack(prompts), longest, progress)
                else:
                    ids = [
                        _answer_by_chunk(subject.model, parts, longest, chunk, progress)
                        for parts in (
                            task.parts(prompt, question.needle)
                            for prompt, question in zip(prompts, asked, strict=True)
                        )
                    ]
                said = [task.tokenizer.decode(row).strip() for row in ids]
                results.append(
                    {
                        "model": subject.name,
                        **asdict(sample),
                        "key": question.needle.key,
                        "said": text,
                        "correct": text[:5] == question.needle.key,
                    }
                    for sample, question, text in zip(batch, asked, said, strict=True)
                )
                progress.advance(len(batch), 0, f"at {format_length(batch[0].length)}")
    kept = set(wanted)
    return [row for row in results.rows if _sample(row) in kept]


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


def _batches(samples: Sequence[Sample], size: int) -> Iterator[list[Sample]]:
    """Samples of one length at a time: padding would enter the state."""
    for length in dict.fromkeys(sample.length for sample in samples):
        same = [sample for sample in samples if sample.length == length]
        yield from (same[start : start + size] for start in range(0, len(same), size))


@torch.no_grad()
def _answers(
    model: LanguageModel, prompts: Tensor, longest: int, progress: Progress
) -> list[list[int]]:
    """The ids of greedy answers of `longest` tokens to prompts `(b, t)`."""
    state = model.init_state(len(prompts))
    *head, last = prompts.to(state.position.device).split(PIECE, dim=1)
    for piece in head:
        state = model(piece, state, keep=0).state
        progress.advance(0, piece.numel())
    tokens = generate(model, last, state, max_new_tokens=longest).tokens
    progress.advance(0, last.numel())
    return tokens


def _answer_by_chunk(
    model: LanguageModel,
    parts: tuple[Tensor, Tensor, Tensor],
    longest: int,
    chunk: int,
    progress: Progress,
) -> list[int]:
    """The same for one prompt, in parts, from the chunk that is chosen."""
    prefix, context, query = parts
    chosen = select(model, context, query, chunk=chunk, prefix=prefix)
    progress.advance(0, sum(map(len, parts)))
    query = query[None].to(chosen.state.position.device)
    return generate(model, query, chosen.state, max_new_tokens=longest).tokens[0]


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
