"""Passkey retrieval over lengths × positions of the key, with greedy answers and held-out keys.

Notable choices:
- A relative depth puts the key at a share of the filler, so that its position grows with the
  prompt. An absolute insertion point puts the key after a fixed number of filler tokens at every
  length, which separates the position of the key from its distance to the question.
- If header, key and question are a small part of a prompt, a depth is a share of the whole length,
  so that half of 4k and a quarter of 8k are the same position.
- A key depends on its position and index only: a longer prompt with a key at the same position
  begins with a shorter one, and the common beginning is read once.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from pydantic import PrivateAttr

from longrnn.data import Passkey
from longrnn.data.prompts import Needle, draw_needles, is_recalled, keys, read
from longrnn.errors import UserError
from longrnn.evaluation.base import Column, Evaluation, Found, Item, Measurement
from longrnn.evaluation.options import PasskeyOptions
from longrnn.hf.opened import OpenCheckpoint
from longrnn.inference.chunk_select import select
from longrnn.inference.engine import Answer, Cost, Prompt, answers, count_tokens, out_of_reach
from longrnn.intervals import SCORE, independent_stretches
from longrnn.models import generate
from longrnn.progress import Progress
from longrnn.text import read_text
from longrnn.units import format_length

if TYPE_CHECKING:
    from longrnn.evaluation.base import Cell
    from longrnn.evaluation.report import Picture

# A prompt is short if everything but its filler is more than 1 / SHORT of it.
SHORT = 8
# Version of the prompts, which belongs to the protocol.
VERSION = 3


class Question(NamedTuple):
    """The keys of a prompt, the index of the queried key, and where in the filler it begins."""

    needles: list[Needle]
    asked: int
    start: float

    @property
    def needle(self) -> Needle:
        """The key that is queried."""
        return self.needles[self.asked]


class Sample(NamedTuple):
    """The `number`-th prompt of a cell.

    Attributes:
        length: exact length of the prompt in tokens.
        place: a depth from 0 to 1 (float), or the tokens of filler before the key (int).
        number: which of the prompts.
    """

    length: int
    place: Any
    number: int

    def question(self, task: Passkey, seed: int, n_keys: int) -> Question:
        """Return the prompt's keys, all held out from training; the queried one is at `place`."""
        start = random.Random(f"{seed}/{self.number}").random()
        if n_keys > 1:
            rng = random.Random(f"{seed}/{self.place}/{self.number}")
            needles = draw_needles(rng, n_keys, held_out=True)
            asked = rng.randrange(n_keys)
            needles[asked] = needles[asked]._replace(depth=self.place)
            return Question(needles, asked, start)
        is_depth = isinstance(self.place, float)
        token = round(self.place * self.length) if is_depth else self.place
        key = random.Random(f"{seed}/{token}/{self.number}").choice(keys(True))
        if is_depth:
            free = task.free(key, self.length)
            if (self.length - free) * SHORT > self.length:
                return Question([Needle(key, self.place)], 0, start)
            token = min(token, free)
        return Question([task.needle_at(key, token, length=self.length)], 0, start)


class PasskeyRetrieval(PasskeyOptions, Evaluation):
    """Passkey retrieval, see `PasskeyOptions`."""

    kind: ClassVar[str] = "passkey"

    _tasks: dict[str, Passkey] = PrivateAttr(default_factory=dict)
    # The most tokens of a question and of an answer.
    _longest: dict[str, tuple[int, int]] = PrivateAttr(default_factory=dict)
    _samples: list[Sample] = PrivateAttr(default_factory=list)

    def files(self) -> list[Path]:
        return [] if self.filler is None else [self.filler]

    @property
    def is_absolute(self) -> bool:
        """Whether the grid has insertion points."""
        return self.insert_at is not None

    def prepare(self, models: Sequence[OpenCheckpoint]) -> None:
        if {"depths", "insert_at"} <= self.model_fields_set:
            raise UserError("give one of --depths and --insert-at")
        if self.is_absolute and self.n_keys > 1:
            raise UserError("a grid of insertion points has one key per prompt: leave out --n-keys")
        files = None if self.filler is None else [str(self.filler)]
        self._tasks = {
            model.name: Passkey(model.tokenizer, filler=files, n_keys=self.n_keys)
            for model in models
        }
        some = [Needle(key, 0.5, int(self.n_keys > 1)) for key in keys(True)[::97]]
        self._longest = {
            name: (
                max(len(task.question(one)) for one in some),
                max(len(task.answer(one)) for one in some),
            )
            for name, task in self._tasks.items()
        }
        needs = {name: task.least_length() for name, task in self._tasks.items()}
        least = max(needs.values())
        if self.lengths[0] < least:
            name = max(needs, key=lambda one: needs[one])
            raise UserError(
                f"length {self.lengths[0]} is too short for the passkey prompt: the least is "
                f"{least} tokens with the tokenizer of {name}; give that or more"
            )
        self._samples = [Sample(*cell) for cell in self._grid(least)]

    def _grid(self, least: int) -> list[tuple[int, Any, int]]:
        """Return the cells; a length that is too short for an insertion point has none with it."""
        if self.insert_at is None:
            depths = dict.fromkeys(map(float, self.depths))
            return list(product(self.lengths, depths, range(self.n)))
        places = self.insert_at
        if places[-1] + least > self.lengths[-1]:
            raise UserError(
                f"a key after {format_length(places[-1])} tokens of filler needs a prompt of "
                f"{places[-1] + least:,} tokens or more: give a greater length, or leave "
                f"{format_length(places[-1])} out"
            )
        cells = product(self.lengths, places, range(self.n))
        return [cell for cell in cells if cell[1] + least <= cell[0]]

    def protocol(self, model: OpenCheckpoint) -> dict[str, Any]:
        found: dict[str, Any] = {"seed": self.seed, "version": VERSION}
        if self.n_keys > 1:
            found["n_keys"] = self.n_keys
        if self.filler is not None:
            found["filler"] = read_text(self.filler)[1]
        if self.chunk_select is not None:
            found["chunk_select"] = self.chunk_select
        return found

    def items(self, model: OpenCheckpoint) -> list[Item]:
        place = "insert_at" if self.is_absolute else "depth"
        return [
            # Prompts with the same index begin at the same place and share keys.
            Item(
                {"length": sample.length, place: sample.place, "index": sample.number},
                sample,
                (sample.number, sample.place),
            )
            for sample in self._samples
            if self._reason(model, sample.length) is None
        ]

    def measure(
        self, model: OpenCheckpoint, items: Sequence[Item], progress: Progress
    ) -> Iterator[Found]:
        task = self._tasks[model.name]
        samples = [item.spec for item in items]
        questions = [sample.question(task, self.seed, self.n_keys) for sample in samples]
        prompts = self._prompts(task, samples, questions)
        if self.chunk_select is None:
            found = answers(
                model.model,
                prompts,
                max_new_tokens=_longest_answer(task, questions),
                batch_size=self.batch_size,
                progress=progress,
            )
        else:
            found = self._by_chunk(model, prompts, questions, progress)
        for batch in found:
            rows = []
            for number, ids in batch:
                key, said = questions[number].needle.key, task.tokenizer.decode(ids).strip()
                row = {"key": key, "said": said, "correct": is_recalled(said, key)}
                if task.own_filler:
                    covers = samples[number].length / task.n_filler
                    row |= {"start": questions[number].start, "covers": covers}
                rows.append((items[number], row))
            lengths = {format_length(samples[number].length) for number, _ in batch}
            progress.advance(len(batch), 0, f"at {', '.join(lengths)}")
            yield rows

    def columns(self, model: OpenCheckpoint, found: Found) -> list[Measurement]:
        by_place: dict[tuple[int, Any], Found] = {}
        for item, row in found:
            for place in (item.spec.place, None):
                by_place.setdefault((item.spec.length, place), []).append((item, row))
        measurements = []
        places = dict.fromkeys(sample.place for sample in self._samples)
        several = places if len(places) > 1 else ()
        for length, place in product(self.lengths, [*several, None]):
            own = by_place.get((length, place), [])
            name = f"{self.title}, keys recalled"
            if place is not None:
                name = self._place(place) if self.is_absolute else f"depth {place:.0%}"
            quantity = SCORE if place is None else SCORE._replace(difference=None)
            column = Column(name, quantity, drawn=place is None, brief=self.is_absolute)
            samples = {
                f"{item.spec.place}/{item.spec.number}": float(row["correct"]) for item, row in own
            }
            reason = self._reason(model, length)
            measurements.append(Measurement(column, length, samples, reason, independent(own)))
        return measurements

    def notes(self, model: OpenCheckpoint, found: Found) -> list[str]:
        notes = []
        counts: dict[int, Found] = {}
        for pair in found:
            counts.setdefault(pair[0].spec.length, []).append(pair)
        overlapping = [
            f"{count:.1f} of {len(own)} at {format_length(length)}"
            for length, own in counts.items()
            if (count := independent(own)) is not None
        ]
        if overlapping:
            notes.append(
                "Prompts that contain the same filler text are not independent: the intervals "
                f"count {', '.join(overlapping)}."
            )
        if found and self.chunk_select is None and not self.naive:
            cost = self.cost(model)
            notes.append(
                f"Sharing prefixes, the whole grid takes {cost.shared:,} tokens per model; prompt "
                f"by prompt it takes {cost.naive:,}, {cost.ratio:.1f} × as many."
            )
        return notes

    def cost(self, model: OpenCheckpoint) -> Cost:
        """Count the tokens that a model reads for its prompts, with shared prefixes and without."""
        task, samples = self._tasks[model.name], [item.spec for item in self.items(model)]
        questions = [sample.question(task, self.seed, self.n_keys) for sample in samples]
        prompts = self._prompts(task, samples, questions)
        return count_tokens(prompts, max_new_tokens=_longest_answer(task, questions))

    def pictures(
        self, cells: Sequence[Cell], found: Mapping[str, Found], models: Sequence[OpenCheckpoint]
    ) -> list[Picture]:
        from longrnn.evaluation.figures import heat_maps
        from longrnn.evaluation.report import Picture, by_length

        shares: dict[str, dict[tuple[float, float], float]] = {}
        for name, own in found.items():
            places: dict[tuple[float, float], list[bool]] = {}
            for item, row in own:
                length, place, _ = item.spec
                across = length - place if self.is_absolute else length
                places.setdefault((across, place), []).append(row["correct"])
            if places:
                shares[name] = {at: sum(right) / len(right) for at, right in places.items()}
        if not shares:
            return []
        if self.is_absolute:
            axes = "distance since the key (tokens)", "filler before the key (tokens)"
        else:
            axes = "prompt length (tokens)", "depth of the key"
        png = heat_maps(shares, axes, self._place, "keys recalled")
        caption = f"Keys recalled by {axes[0]} and {axes[1]}, means over prompts."
        drawn = by_length(self, cells) if len(models) > 1 else []
        return [*drawn, Picture(f"{self.title}_by_position", caption, png)]

    def _place(self, place: float) -> str:
        return format_length(int(place)) if self.is_absolute else f"{place:.0%}"

    def _reason(self, model: OpenCheckpoint, length: int) -> str | None:
        """Return why a model cannot read prompts of a length with their answers."""
        task, (question, answer) = self._tasks[model.name], self._longest[model.name]
        if self.chunk_select is not None:
            length = min(length, task.n_header + self.chunk_select + question)
        return out_of_reach(model.model, length + answer)

    def _prompts(
        self, task: Passkey, samples: Sequence[Sample], questions: Sequence[Question]
    ) -> list[Prompt]:
        prompts = []
        for index, (sample, question) in enumerate(zip(samples, questions, strict=True)):
            start = int(question.start * task.n_filler) if task.own_filler else 0
            needles, ids = question.needles, task.question(question.needle)
            context = task.context(needles, question.asked, length=sample.length, start=start)
            if self.naive:
                prompts.append(Prompt(context, ids, None, 0, index))
                continue
            # The fork is after header and filler, at the first key line. Prompts with the same
            # single key share a branch; with several keys, the text after the first depends on the
            # length.
            fork = context[0].size + context[1].size
            branch = needles[0].key if len(needles) == 1 else sample
            prompts.append(Prompt(context, ids, start, fork, branch))
        return prompts

    def _by_chunk(
        self,
        model: OpenCheckpoint,
        prompts: Sequence[Prompt],
        questions: Sequence[Question],
        progress: Progress,
    ) -> Iterator[list[Answer]]:
        """Yield one answer at a time, each from the chunk that was selected for it."""
        task = self._tasks[model.name]
        assert self.chunk_select is not None
        for index, (prompt, question) in enumerate(zip(prompts, questions, strict=True)):
            header, *rest = prompt.context
            text = read(rest)
            chosen = select(
                model.model, text, prompt.question, chunk=self.chunk_select, prefix=read([header])
            )
            progress.advance(0, header.size + len(text) + len(prompt.question))
            ids = prompt.question[None].to(chosen.state.position.device)
            longest = len(task.answer(question.needle))
            generated = generate(model.model, ids, chosen.state, max_new_tokens=longest)
            yield [Answer(index, generated.tokens[0])]


def independent(found: Found) -> float | None:
    """Return how many of the prompts of one length count as independent; None for all of them.

    Prompts that read overlapping parts of a text file are not independent samples of such texts,
    see `independent_stretches`. With the built-in filler, all prompts have the same text and only
    the key is sampled.
    """
    if not found or "covers" not in found[0][1]:
        return None
    return independent_stretches([row["start"] for _, row in found], found[0][1]["covers"])


def _longest_answer(task: Passkey, questions: Sequence[Question]) -> int:
    return max((len(task.answer(question.needle)) for question in questions), default=1)
