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
from longrnn.evaluation.base import Column, Evaluation, Found, Item, Sample
from longrnn.evaluation.options import PasskeyOptions
from longrnn.evaluation.passkey_prompts import build, draw
from longrnn.hf.opened import OpenCheckpoint
from longrnn.inference.chunk_select import select
from longrnn.inference.engine import Answer, Prompt, answers, count_tokens, out_of_reach
from longrnn.intervals import SCORE, SHARE_OF_STRETCHES, independent_stretches
from longrnn.models import LanguageModel, generate
from longrnn.progress import Progress
from longrnn.results import Row
from longrnn.text import read_text
from longrnn.units import format_length

if TYPE_CHECKING:
    from longrnn.evaluation.base import Cell
    from longrnn.evaluation.report import Picture

# Shares at one place, which have too few prompts for a comparison.
PLACE = SCORE._replace(difference=None)
# Version of the prompts, which belongs to the protocol.
VERSION = 3


class PasskeyRetrieval(PasskeyOptions, Evaluation):
    """Passkey retrieval, see `PasskeyOptions`."""

    kind: ClassVar[str] = "passkey"

    _tasks: dict[str, Passkey] = PrivateAttr(default_factory=dict)
    # The most tokens of a question and of an answer.
    _longest: dict[str, tuple[int, int]] = PrivateAttr(default_factory=dict)

    def files(self) -> list[Path]:
        return [] if self.filler is None else [self.filler]

    def prepare(self, models: Sequence[OpenCheckpoint]) -> None:
        if self.insert_at is not None and ("depths" in self.model_fields_set or self.n_keys > 1):
            raise UserError(
                "--insert-at gives the places of one key per prompt: leave out --depths and "
                "--n-keys, or --insert-at"
            )
        for model in models:
            task = Passkey(model.tokenizer, filler=[*map(str, self.files())], n_keys=self.n_keys)
            self._tasks[model.name] = task
        least, name = max((task.least_length(), name) for name, task in self._tasks.items())
        last = 0 if self.insert_at is None else self.insert_at[-1]
        if self.lengths[0] < least or self.lengths[-1] < last + least:
            raise UserError(
                f"with the tokenizer of {name} a prompt has at least {least} tokens, and "
                f"{last + least:,} with a key after {format_length(last)} tokens of filler: give "
                f"greater lengths than {', '.join(map(format_length, self.lengths))}"
            )
        place_name = "depth" if self.insert_at is None else "insert_at"
        for model in models:
            task = self._tasks[model.name]
            drawn = [
                draw(task, length, place, number, self.seed, self.n_keys)
                for length, place, number in product(self.lengths, self._places(), range(self.n))
                # A length that is too short for an insertion point has no prompt with it.
                if self.insert_at is None or place + least <= length
            ]
            sizes = [(len(task.question(q.needle)), len(task.answer(q.needle))) for q in drawn]
            self._longest[model.name] = max(size for size, _ in sizes), max(n for _, n in sizes)
            self._items[model.name] = [
                Item(
                    {"length": q.length, place_name: q.place, "index": q.number},
                    q,
                    # Prompts with the same index begin at the same place and share keys.
                    (q.number, q.place),
                )
                for q in drawn
                if self._reason(model, q.length) is None
            ]

    def protocol(self, model: OpenCheckpoint) -> dict[str, Any]:
        return {
            "seed": self.seed,
            "version": VERSION,
            "n_keys": self.n_keys,
            "fillers": [read_text(path)[1] for path in self.files()],
            "chunk_select": self.chunk_select,
        }

    def measure(
        self, model: OpenCheckpoint, items: Sequence[Item], progress: Progress
    ) -> Iterator[Found]:
        task, questions = self._tasks[model.name], [item.spec for item in items]
        prompts = build(task, questions, naive=self.naive)
        longest = self._longest[model.name][1]
        if self.chunk_select is None:
            how: dict[str, Any] = {"batch_size": self.batch_size, "progress": progress}
            found = answers(model.model, prompts, max_new_tokens=longest, **how)
        else:
            found = by_chunk(model.model, prompts, self.chunk_select, longest, progress)
        for batch in found:
            rows = []
            for number, ids in batch:
                key, said = questions[number].needle.key, task.tokenizer.decode(ids).strip()
                row = {"key": key, "said": said, "correct": is_recalled(said, key)}
                rows.append((items[number], row))
            progress.advance(len(batch), 0)
            yield rows

    def samples(self, item: Item, row: Row) -> Iterator[Sample]:
        asked, right = item.spec, float(row["correct"])
        name = f"{asked.place}/{asked.number}"
        if len(self._places()) > 1:
            label = _label(asked.place)
            column = Column(
                f"depth {label}" if self.insert_at is None else label, PLACE, brief=True
            )
            yield Sample(column, asked.length, name, right)
        # With the built-in filler, all prompts have the same text and only the key is sampled.
        value = right if self.filler is None else (right, asked.start, asked.covers)
        yield Sample(self._recalled(), asked.length, name, value)

    def unmeasured(self, model: OpenCheckpoint) -> Iterator[Sample]:
        for length in self.lengths:
            if reason := self._reason(model, length):
                yield Sample(self._recalled(), length, reason=reason)

    def _recalled(self) -> Column:
        quantity = SCORE if self.filler is None else SHARE_OF_STRETCHES
        return Column(f"{self.title}, keys recalled", quantity)

    def notes(self, model: OpenCheckpoint, found: Found) -> list[str]:
        notes, overlapping = [], []
        for length in self.lengths if self.filler is not None else ():
            asked = [item.spec for item, _ in found if item.spec.length == length]
            if asked:
                count = independent_stretches([one.start for one in asked], asked[0].covers)
                overlapping.append(f"{count:.1f} of {len(asked)} at {format_length(length)}")
        if overlapping:
            notes.append(
                "Prompts that contain the same filler text are not independent: the intervals "
                f"count {', '.join(overlapping)}."
            )
        if found and self.chunk_select is None and not self.naive:
            questions = [item.spec for item, _ in found]
            prompts = build(self._tasks[model.name], questions, naive=False)
            cost = count_tokens(prompts, max_new_tokens=self._longest[model.name][1])
            notes.append(
                f"Sharing prefixes, the whole grid takes {cost.shared:,} tokens per model; prompt "
                f"by prompt it takes {cost.naive:,}, {cost.ratio:.1f} × as many."
            )
        return notes

    def pictures(
        self, cells: Sequence[Cell], found: Mapping[str, Found], models: Sequence[OpenCheckpoint]
    ) -> list[Picture]:
        from longrnn.evaluation.figures import heat_maps, png
        from longrnn.evaluation.report import Picture, by_length, picture_name

        right: dict[str, dict[tuple[float, float], list[bool]]] = {}
        for name, own in found.items():
            for item, row in own:
                length, place = item.spec[:2]
                at = (length if self.insert_at is None else length - place, place)
                right.setdefault(name, {}).setdefault(at, []).append(row["correct"])
        if not right:
            return []
        shares = {
            name: {at: sum(one) / len(one) for at, one in own.items()}
            for name, own in right.items()
        }
        axes = "prompt length (tokens)", "depth of the key"
        if self.insert_at is not None:
            axes = "distance since the key (tokens)", "filler before the key (tokens)"
        figure = heat_maps(shares, axes, _label, "keys recalled")
        caption = f"Keys recalled by {axes[0]} and {axes[1]}, means over prompts."
        drawn = by_length(self, cells) if len(models) > 1 else []
        return [*drawn, Picture(picture_name(self.title, "by position"), caption, png(figure))]

    def _places(self) -> list[Any]:
        """Return the insertion points, or the depths."""
        return list(dict.fromkeys(self.depths if self.insert_at is None else self.insert_at))

    def _reason(self, model: OpenCheckpoint, length: int) -> str | None:
        """Return why a model cannot read prompts of a length with their answers."""
        task, (question, answer) = self._tasks[model.name], self._longest[model.name]
        if self.chunk_select is not None:
            length = min(length, task.n_header + self.chunk_select + question)
        return out_of_reach(model.model, length + answer)


def by_chunk(
    model: LanguageModel, prompts: Sequence[Prompt], chunk: int, longest: int, progress: Progress
) -> Iterator[list[Answer]]:
    """Yield one answer at a time, of `longest` tokens, from the chunk that was selected for it."""
    for index, prompt in enumerate(prompts):
        header, *rest = prompt.context
        text, question = read(rest), prompt.question
        chosen = select(model, text, question, chunk=chunk, prefix=read([header]))
        progress.advance(0, header.size + len(text) + len(question))
        ids = question[None].to(chosen.state.position.device)
        generated = generate(model, ids, chosen.state, max_new_tokens=longest)
        yield [Answer(index, generated.tokens[0])]


def _label(place: float) -> str:
    """Return a depth, which is a float, or an insertion point as text."""
    return f"{place:.0%}" if isinstance(place, float) else format_length(place)
