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

import math
import random
from collections.abc import Callable, Iterator, Sequence
from itertools import product
from typing import Any, ClassVar, NamedTuple

import torch
from pydantic import PrivateAttr
from torch import Tensor

from longrnn.data import Passkey
from longrnn.data.prompts import Needle, RepeatedTokens, draw_needles, is_recalled, keys, read
from longrnn.errors import UserError
from longrnn.evaluation.base import Column, Evaluation, Found, Item, Plan, Sample, within
from longrnn.evaluation.options import PasskeyOptions
from longrnn.evaluation.texts import warn_if_calibrated_on
from longrnn.files import read_text
from longrnn.hf.opened import OpenCheckpoint, refuse_unfit
from longrnn.inference.chunk_select import select
from longrnn.inference.engine import complete
from longrnn.intervals import SCORE, SHARE_OF_STRETCHES
from longrnn.models import LanguageModel, generate
from longrnn.progress import Progress
from longrnn.results import Row
from longrnn.units import format_length

# The column of a place, which has too few prompts for an interval.
AT_PLACE = Column("", SCORE, drawn=False, brief=True)
# A prompt is short if everything but its filler is more than 1 / SHORT of it.
SHORT = 8


class Question(NamedTuple):
    """One prompt.

    Attributes:
        length: exact length of the prompt in tokens.
        place: a depth from 0 to 1 (float), or the tokens of filler before the key (int).
        number: which of the prompts of this length and place.
        needles: the keys.
        asked: index of the key that is queried.
        start: where in the filler the prompt begins, as a share of it.
        covers: length of the prompt, as a share of the filler.
    """

    length: int
    place: Any
    number: int
    needles: list[Needle]
    asked: int
    start: float
    covers: float

    @property
    def needle(self) -> Needle:
        """The key that is queried."""
        return self.needles[self.asked]

    @property
    def label(self) -> str:
        """The place as text."""
        is_depth = isinstance(self.place, float)
        return f"depth {100 * self.place:g}%" if is_depth else format_length(self.place)


class PasskeyRetrieval(PasskeyOptions, Evaluation):
    """Passkey retrieval, see `PasskeyOptions`."""

    kind: ClassVar[str] = "passkey"

    # By the name of the model: its prompts, and the most tokens of an answer.
    _tasks: dict[str, tuple[Passkey, int]] = PrivateAttr(default_factory=dict)

    def plan(self, models: Sequence[OpenCheckpoint]) -> list[Plan]:
        if self.insert_at is not None and self.n_keys > 1:
            raise UserError("--insert-at is for one key per prompt: leave --n-keys out")
        return [self._plan(model) for model in models]

    def _plan(self, model: OpenCheckpoint) -> Plan:
        refuse_unfit(model.tokenizer, model.model, model.name)
        filler = [] if self.filler is None else [self.filler]
        for path in filler:
            warn_if_calibrated_on(path.name, read_text(path)[1], model.model)
        task = Passkey(model.tokenizer, filler=[*map(str, filler)], n_keys=self.n_keys)
        least, last = task.least_length(), max(self.insert_at or [0])
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
        reached, reasons = within(model, tokens, self._recalled())
        # Prompts with the same index begin at the same place and share keys.
        items = [
            Item({"length": q.length, "place": q.place, "index": q.number}, q, (q.number, q.place))
            for q in drawn
            if q.length in reached
        ]
        return Plan(items, reasons)

    def protocol(self, model: OpenCheckpoint) -> dict[str, Any]:
        return {
            "seed": self.seed,
            "n_keys": self.n_keys,
            "filler": None if self.filler is None else read_text(self.filler)[1],
            "chunk_select": self.chunk_select,
        }

    def measure(
        self, model: OpenCheckpoint, items: Sequence[Item], progress: Progress
    ) -> Iterator[Found]:
        task, longest = self._tasks[model.name]
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
            how = {"chunk": self.chunk_select, "batch_size": self.batch_size}
            found = by_chunk(model.model, prompts, **how, **options)
        for number, text in found:
            key, said = items[number].spec.needle.key, text.strip()
            progress.advance(1, 0)
            yield [(items[number], {"key": key, "said": said, "correct": is_recalled(said, key)})]

    def samples(self, item: Item, row: Row) -> Iterator[Sample]:
        asked, right = item.spec, float(row["correct"])
        name = f"{asked.place}/{asked.number}"
        if len(self._places()) > 1:
            yield Sample(AT_PLACE._replace(name=asked.label), asked.length, name, right)
        # With the built-in filler, all prompts have the same text and only the key is sampled.
        value = right if self.filler is None else (right, asked.start, asked.covers)
        yield Sample(self._recalled(), asked.length, name, value)

    def _recalled(self) -> Column:
        quantity = SCORE if self.filler is None else SHARE_OF_STRETCHES
        return Column(f"{self.title}, keys recalled", quantity)

    def _places(self) -> list[Any]:
        """Return the insertion points, or the depths."""
        return self.depths if self.insert_at is None else self.insert_at


def draw(task: Passkey, length: int, place: Any, number: int, seed: int, n_keys: int) -> Question:
    """Return a prompt's keys, all held out from training; the queried one is at `place`."""
    start, covers = random.Random(f"{seed}/{number}").random(), length / task.n_filler
    if n_keys > 1:
        rng = random.Random(f"{seed}/{place}/{number}")
        needles = draw_needles(rng, n_keys, held_out=True)
        asked = rng.randrange(n_keys)
        needles[asked] = needles[asked]._replace(depth=place)
        return Question(length, place, number, needles, asked, start, covers)
    is_depth = isinstance(place, float)
    token = round(place * length) if is_depth else place
    key = random.Random(f"{seed}/{token}/{number}").choice(keys(True))
    free = task.free(key, length)
    is_share = is_depth and (length - free) * SHORT > length
    # The prompt multiplies by `free` and rounds: a quotient of integers comes back exactly.
    depth = place if is_share else min(token, free) / max(free, 1)
    return Question(length, place, number, [Needle(key, depth)], 0, start, covers)


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
    batch_size: int,
    decode: Callable[[Sequence[int]], str],
    max_new_tokens: int,
    progress: Progress,
) -> Iterator[tuple[int, str]]:
    """Yield the index of a prompt and the answer from the chunk that was selected for it."""
    for index, ((header, *rest), question) in enumerate(prompts):
        text = read(rest)
        how = {"chunk": chunk, "prefix": read([header]), "batch_size": batch_size}
        chosen = select(model, text, question, **how)
        progress.advance(0, header.size + len(text) + len(question))
        ids = question[None].to(chosen.state.position.device)
        generated = generate(model, ids, chosen.state, max_new_tokens=max_new_tokens)
        yield index, decode(generated.tokens[0])
