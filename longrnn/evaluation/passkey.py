"""Passkey retrieval over lengths × positions of the key, with greedy answers and held-out keys."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import PrivateAttr

from longrnn.data import Passkey
from longrnn.data.prompts import is_recalled, read
from longrnn.errors import UserError
from longrnn.evaluation.base import Column, Evaluation, Found, Item, Measurement
from longrnn.evaluation.options import PasskeyOptions
from longrnn.evaluation.passkey_prompts import Question, build, draw
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

# Version of the prompts, which belongs to the protocol.
VERSION = 3


class PasskeyRetrieval(PasskeyOptions, Evaluation):
    """Passkey retrieval, see `PasskeyOptions`."""

    kind: ClassVar[str] = "passkey"

    _tasks: dict[str, Passkey] = PrivateAttr(default_factory=dict)
    _questions: dict[str, list[Question]] = PrivateAttr(default_factory=dict)
    # The most tokens of a question and of an answer.
    _longest: dict[str, tuple[int, int]] = PrivateAttr(default_factory=dict)
    # Lengths, places and numbers of all prompts.
    _grid: list[tuple[int, Any, int]] = PrivateAttr(default_factory=list)

    def files(self) -> list[Path]:
        return [] if self.filler is None else [self.filler]

    def prepare(self, models: Sequence[OpenCheckpoint]) -> None:
        if self.insert_at is not None and "depths" in self.model_fields_set:
            raise UserError("give one of --depths and --insert-at")
        if self.insert_at is not None and self.n_keys > 1:
            raise UserError("a grid of insertion points has one key per prompt: leave out --n-keys")
        files = None if self.filler is None else [str(self.filler)]
        tasks = {
            model.name: Passkey(model.tokenizer, filler=files, n_keys=self.n_keys)
            for model in models
        }
        needs = {name: task.least_length() for name, task in tasks.items()}
        name, least = max(needs.items(), key=lambda need: need[1])
        if self.lengths[0] < least:
            raise UserError(
                f"length {self.lengths[0]} is too short for the passkey prompt: the least is "
                f"{least} tokens with the tokenizer of {name}; give that or more"
            )
        if self.insert_at is not None and self.insert_at[-1] + least > self.lengths[-1]:
            last = self.insert_at[-1]
            raise UserError(
                f"a key after {format_length(last)} tokens of filler needs a prompt of "
                f"{last + least:,} tokens or more: give a greater length, or leave "
                f"{format_length(last)} out"
            )
        # A length that is too short for an insertion point has no prompt with it.
        self._grid = [
            (length, place, number)
            for length, place, number in product(self.lengths, self._places(), range(self.n))
            if self.insert_at is None or place + least <= length
        ]
        self._tasks = tasks
        for name, task in tasks.items():
            drawn = [draw(task, *cell, self.seed, self.n_keys) for cell in self._grid]
            sizes = [(len(task.question(q.needle)), len(task.answer(q.needle))) for q in drawn]
            self._questions[name] = drawn
            self._longest[name] = max(size for size, _ in sizes), max(size for _, size in sizes)

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
        place = "depth" if self.insert_at is None else "insert_at"
        return [
            # Prompts with the same index begin at the same place and share keys.
            Item({"length": q.length, place: q.place, "index": q.number}, q, (q.number, q.place))
            for q in self._questions[model.name]
            if self._reason(model, q.length) is None
        ]

    def measure(
        self, model: OpenCheckpoint, items: Sequence[Item], progress: Progress
    ) -> Iterator[Found]:
        task, questions = self._tasks[model.name], [item.spec for item in items]
        prompts = build(task, questions, naive=self.naive)
        if self.chunk_select is None:
            found = answers(
                model.model,
                prompts,
                max_new_tokens=self._longest[model.name][1],
                batch_size=self.batch_size,
                progress=progress,
            )
        else:
            found = self._by_chunk(model, prompts, self.chunk_select, progress)
        for batch in found:
            rows = []
            for number, ids in batch:
                asked, said = questions[number], task.tokenizer.decode(ids).strip()
                key = asked.needle.key
                row = {"key": key, "said": said, "correct": is_recalled(said, key)}
                if task.own_filler:
                    row |= {"start": asked.start, "covers": asked.length / task.n_filler}
                rows.append((items[number], row))
            lengths = {format_length(item.spec.length) for item, _ in rows}
            progress.advance(len(batch), 0, f"at {', '.join(lengths)}")
            yield rows

    def _by_chunk(
        self, model: OpenCheckpoint, prompts: Sequence[Prompt], chunk: int, progress: Progress
    ) -> Iterator[list[Answer]]:
        """Yield one answer at a time, each from the chunk that was selected for it."""
        for index, prompt in enumerate(prompts):
            header, *rest = prompt.context
            text = read(rest)
            chosen = select(model.model, text, prompt.question, chunk=chunk, prefix=read([header]))
            progress.advance(0, header.size + len(text) + len(prompt.question))
            ids = prompt.question[None].to(chosen.state.position.device)
            longest = self._longest[model.name][1]
            generated = generate(model.model, ids, chosen.state, max_new_tokens=longest)
            yield [Answer(index, generated.tokens[0])]

    def columns(self, model: OpenCheckpoint, found: Found) -> list[Measurement]:
        places = self._places()
        measurements = []
        for length, place in product(self.lengths, [*places, None] if len(places) > 1 else [None]):
            own = [
                (item, row)
                for item, row in found
                if item.spec.length == length and place in (None, item.spec.place)
            ]
            samples = {f"{i.spec.place}/{i.spec.number}": float(row["correct"]) for i, row in own}
            column = Column(f"{self.title}, keys recalled", SCORE)
            if place is not None:
                name = self._place(place) if isinstance(place, int) else f"depth {place:.0%}"
                alone = SCORE._replace(difference=None)
                column = Column(name, alone, drawn=False, brief=True)
            reason = self._reason(model, length)
            measurements.append(Measurement(column, length, samples, reason, independent(own)))
        return measurements

    def notes(self, model: OpenCheckpoint, found: Found) -> list[str]:
        notes, overlapping = [], []
        for length in self.lengths:
            own = [(item, row) for item, row in found if item.spec.length == length]
            if (count := independent(own)) is not None:
                overlapping.append(f"{count:.1f} of {len(own)} at {format_length(length)}")
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
        questions = [item.spec for item in self.items(model)]
        prompts = build(self._tasks[model.name], questions, naive=self.naive)
        return count_tokens(prompts, max_new_tokens=self._longest[model.name][1])

    def pictures(
        self, cells: Sequence[Cell], found: Mapping[str, Found], models: Sequence[OpenCheckpoint]
    ) -> list[Picture]:
        from longrnn.evaluation.figures import heat_maps, png
        from longrnn.evaluation.report import Picture, by_length, picture_name

        shares: dict[str, dict[tuple[float, float], float]] = {}
        for name, own in found.items():
            places: dict[tuple[float, float], list[bool]] = {}
            for item, row in own:
                length, place = item.spec[:2]
                across = length if self.insert_at is None else length - place
                places.setdefault((across, place), []).append(row["correct"])
            if places:
                shares[name] = {at: sum(right) / len(right) for at, right in places.items()}
        if not shares:
            return []
        axes = "prompt length (tokens)", "depth of the key"
        if self.insert_at is not None:
            axes = "distance since the key (tokens)", "filler before the key (tokens)"
        figure = heat_maps(shares, axes, self._place, "keys recalled")
        caption = f"Keys recalled by {axes[0]} and {axes[1]}, means over prompts."
        drawn = by_length(self, cells) if len(models) > 1 else []
        return [*drawn, Picture(picture_name(self.title, "by position"), caption, png(figure))]

    def _places(self) -> list[Any]:
        """Return the insertion points, or the depths."""
        return list(dict.fromkeys(self.depths if self.insert_at is None else self.insert_at))

    def _place(self, place: float) -> str:
        return f"{place:.0%}" if self.insert_at is None else format_length(int(place))

    def _reason(self, model: OpenCheckpoint, length: int) -> str | None:
        """Return why a model cannot read prompts of a length with their answers."""
        task, (question, answer) = self._tasks[model.name], self._longest[model.name]
        if self.chunk_select is not None:
            length = min(length, task.n_header + self.chunk_select + question)
        return out_of_reach(model.model, length + answer)


def independent(found: Found) -> float | None:
    """Return how many of the prompts of one length count as independent; None for all of them.

    Prompts that read overlapping parts of a text file are not independent samples of such texts,
    see `independent_stretches`. With the built-in filler, all prompts have the same text and only
    the key is sampled.
    """
    if not found or "covers" not in found[0][1]:
        return None
    return independent_stretches([row["start"] for _, row in found], found[0][1]["covers"])
