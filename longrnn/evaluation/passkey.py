"""Passkey retrieval over lengths × positions of the key, with greedy answers and held-out keys."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import PrivateAttr

from longrnn.data import Passkey
from longrnn.data.prompts import is_recalled, read
from longrnn.errors import UserError
from longrnn.evaluation.base import Column, Evaluation, Found, Item, Plan, Sample, within
from longrnn.evaluation.figures import heat_maps
from longrnn.evaluation.options import PasskeyOptions
from longrnn.evaluation.passkey_prompts import build, draw
from longrnn.hf.opened import OpenCheckpoint
from longrnn.inference.chunk_select import select
from longrnn.inference.engine import Answer, Prompt, answers, count_tokens
from longrnn.intervals import SCORE, SHARE_OF_STRETCHES
from longrnn.models import LanguageModel, generate
from longrnn.progress import Progress
from longrnn.results import Row
from longrnn.text import read_text
from longrnn.units import format_length

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# The column of a place, which has too few prompts for an interval.
AT_PLACE = Column("", SCORE, drawn=False, brief=True)
# Version of the prompts, which belongs to the protocol.
VERSION = 3


class PasskeyRetrieval(PasskeyOptions, Evaluation):
    """Passkey retrieval, see `PasskeyOptions`."""

    kind: ClassVar[str] = "passkey"

    # By the name of the model: its prompts, and the most tokens of an answer.
    _tasks: dict[str, tuple[Passkey, int]] = PrivateAttr(default_factory=dict)

    def files(self) -> list[Path]:
        return [] if self.filler is None else [self.filler]

    def plan(self, models: Sequence[OpenCheckpoint]) -> list[Plan]:
        if self.insert_at is not None and ("depths" in self.model_fields_set or self.n_keys > 1):
            raise UserError(
                "--insert-at gives the places of one key per prompt: leave out --depths and "
                "--n-keys, or --insert-at"
            )
        return [self._plan(model) for model in models]

    def _plan(self, model: OpenCheckpoint) -> Plan:
        task = Passkey(model.tokenizer, filler=[*map(str, self.files())], n_keys=self.n_keys)
        least, last = task.least_length(), 0 if self.insert_at is None else self.insert_at[-1]
        if self.lengths[0] < least or self.lengths[-1] < last + least:
            raise UserError(
                f"with the tokenizer of {model.name} a prompt has at least {least} tokens, and "
                f"{last + least:,} with a key after {format_length(last)} tokens of filler: give "
                f"greater lengths than {', '.join(map(format_length, self.lengths))}"
            )
        drawn = [
            draw(task, length, place, number, self.seed, self.n_keys)
            for length, place, number in product(self.lengths, self._places(), range(self.n))
            # A length that is too short for an insertion point has no prompt with it.
            if self.insert_at is None or place + least <= length
        ]
        answer = max(len(task.answer(q.needle)) for q in drawn)
        self._tasks[model.name] = task, answer
        # With chunk selection, the most that is read before an answer.
        most = task.n_header + (self.chunk_select or math.inf)
        most += max(len(task.question(q.needle)) for q in drawn)
        tokens = {length: int(min(length, most)) + answer for length in self.lengths}
        reached, beyond = within(model, tokens, self._recalled())
        place_name = "depth" if self.insert_at is None else "insert_at"
        items = [
            Item(
                {"length": q.length, place_name: q.place, "index": q.number},
                q,
                # Prompts with the same index begin at the same place and share keys.
                (q.number, q.place),
            )
            for q in drawn
            if q.length in reached
        ]
        return Plan(items, beyond)

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
        (task, longest), questions = self._tasks[model.name], [item.spec for item in items]
        prompts = build(task, questions)
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
            title = f"depth {label}" if self.insert_at is None else label
            yield Sample(AT_PLACE._replace(name=title), asked.length, name, right)
        # With the built-in filler, all prompts have the same text and only the key is sampled.
        value = right if self.filler is None else (right, asked.start, asked.covers)
        yield Sample(self._recalled(), asked.length, name, value)

    def _recalled(self) -> Column:
        quantity = SCORE if self.filler is None else SHARE_OF_STRETCHES
        return Column(f"{self.title}, keys recalled", quantity)

    def notes(self, model: OpenCheckpoint, found: Found) -> list[str]:
        if not found or self.chunk_select is not None:
            return []
        task, longest = self._tasks[model.name]
        cost = count_tokens(build(task, [q.spec for q, _ in found]), max_new_tokens=longest)
        return [
            f"Sharing prefixes, the whole grid takes {cost.shared:,} tokens per model; prompt by "
            f"prompt it takes {cost.naive:,}, {cost.ratio:.1f} × as many."
        ]

    def pictures(self, found: Mapping[str, Found]) -> Iterator[tuple[str, str, Figure]]:
        shares: dict[str, dict[tuple[float, float], float]] = {}
        for name, own in found.items():
            for item, row in own:
                length, place = item.spec[:2]
                at = (length if self.insert_at is None else length - place, place)
                cells = shares.setdefault(name, {})
                cells[at] = cells.get(at, 0.0) + row["correct"] / self.n
        axes = "prompt length (tokens)", "depth of the key"
        if self.insert_at is not None:
            axes = "distance since the key (tokens)", "filler before the key (tokens)"
        if shares:
            caption = f"Keys recalled by {axes[0]} and {axes[1]}, means over prompts."
            yield "by position", caption, heat_maps(shares, axes, _label, "keys recalled")

    def _places(self) -> list[Any]:
        """Return the insertion points, or the depths."""
        return list(dict.fromkeys(self.depths if self.insert_at is None else self.insert_at))


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
