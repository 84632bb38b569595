"""Passkey retrieval over lengths × positions of the key, with greedy answers and held-out keys."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from pydantic import PrivateAttr
from torch import Tensor

from longrnn.data import Passkey
from longrnn.data.prompts import RepeatedTokens, is_recalled, read
from longrnn.errors import UserError
from longrnn.evaluation.base import Column, Evaluation, Found, Item, Sample
from longrnn.evaluation.figures import heat_maps
from longrnn.evaluation.options import PasskeyOptions
from longrnn.evaluation.passkey_prompts import Question, draw
from longrnn.hf.opened import OpenCheckpoint
from longrnn.inference.chunk_select import select
from longrnn.inference.engine import complete
from longrnn.intervals import SCORE, SHARE_OF_STRETCHES
from longrnn.models import LanguageModel, generate
from longrnn.progress import Progress
from longrnn.results import Row
from longrnn.text import read_text
from longrnn.units import format_length

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# The column of a place, which has too few prompts for a comparison.
AT_PLACE = Column("", SCORE._replace(difference=None), drawn=False, brief=True)
# Version of the prompts, which belongs to the protocol.
VERSION = 3


class PasskeyRetrieval(PasskeyOptions, Evaluation):
    """Passkey retrieval, see `PasskeyOptions`."""

    kind: ClassVar[str] = "passkey"

    _tasks: dict[str, Passkey] = PrivateAttr(default_factory=dict)
    # The most tokens of an answer.
    _answer: dict[str, int] = PrivateAttr(default_factory=dict)

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
            question = max(len(task.question(q.needle)) for q in drawn)
            answer = self._answer[model.name] = max(len(task.answer(q.needle)) for q in drawn)
            # With chunk selection, the most that is read before a question.
            most = task.n_header + (self.chunk_select or math.inf) + question
            reached = {
                length
                for length in self.lengths
                if self.reaches(model, int(min(length, most)) + answer, self._recalled(), length)
            }
            self._items[model.name] = [
                Item(
                    {"length": q.length, place_name: q.place, "index": q.number},
                    q,
                    # Prompts with the same index begin at the same place and share keys.
                    (q.number, q.place),
                )
                for q in drawn
                if q.length in reached
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
        task, longest = self._tasks[model.name], self._answer[model.name]
        prompts = [_prompt(task, item.spec) for item in items]
        options: dict[str, Any] = {
            "decode": task.tokenizer.decode,
            "max_new_tokens": longest,
            "progress": progress,
        }
        if self.chunk_select is None:
            ids = [torch.cat([read(context), question]).int() for context, question in prompts]
            found = complete(model.model, ids, batch_size=self.batch_size, **options)
        else:
            found = by_chunk(model.model, prompts, chunk=self.chunk_select, **options)
        for number, text in found:
            key, said = items[number].spec.needle.key, text.strip()
            progress.advance(1, 0)
            yield [(items[number], {"key": key, "said": said, "correct": is_recalled(said, key)})]

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

    def pictures(
        self, found: Mapping[str, Found], models: Sequence[OpenCheckpoint]
    ) -> Iterator[tuple[str, str, Figure]]:
        right: dict[str, dict[tuple[float, float], list[bool]]] = {}
        for name, own in found.items():
            for item, row in own:
                length, place = item.spec[:2]
                at = (length if self.insert_at is None else length - place, place)
                right.setdefault(name, {}).setdefault(at, []).append(row["correct"])
        shares = {
            name: {at: sum(one) / len(one) for at, one in own.items()}
            for name, own in right.items()
        }
        axes = "prompt length (tokens)", "depth of the key"
        if self.insert_at is not None:
            axes = "distance since the key (tokens)", "filler before the key (tokens)"
        if shares:
            caption = f"Keys recalled by {axes[0]} and {axes[1]}, means over prompts."
            yield "by position", caption, heat_maps(shares, axes, _label, "keys recalled")

    def _places(self) -> list[Any]:
        """Return the insertion points, or the depths."""
        return list(dict.fromkeys(self.depths if self.insert_at is None else self.insert_at))


def _prompt(task: Passkey, asked: Question) -> tuple[list[RepeatedTokens], Tensor]:
    """Return the context of a prompt, which begins with the header, and its question."""
    start = int(asked.start * task.n_filler) if task.own_filler else 0
    context = task.context(asked.needles, asked.asked, length=asked.length, start=start)
    return context, task.question(asked.needle)


def by_chunk(
    model: LanguageModel,
    prompts: Sequence[tuple[list[RepeatedTokens], Tensor]],
    *,
    chunk: int,
    decode: Callable[[Sequence[int]], str],
    max_new_tokens: int,
    progress: Progress,
) -> Iterator[tuple[int, str]]:
    """Yield the index of a prompt and the answer from the chunk that was selected for it."""
    for index, ((header, *rest), question) in enumerate(prompts):
        text = read(rest)
        chosen = select(model, text, question, chunk=chunk, prefix=read([header]))
        progress.advance(0, header.size + len(text) + len(question))
        ids = question[None].to(chosen.state.position.device)
        generated = generate(model, ids, chosen.state, max_new_tokens=max_new_tokens)
        yield index, decode(generated.tokens[0])


def _label(place: float) -> str:
    """Return a depth, which is a float, or an insertion point as text."""
    return f"{place:.0%}" if isinstance(place, float) else format_length(place)
