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

import math
import random
from collections.abc import Iterator, Sequence
from itertools import product
from typing import Any, NamedTuple

from torch import Tensor

from longrnn.checkpoints.opened import OpenCheckpoint, refuse_unfit
from longrnn.data import Passkey
from longrnn.data.prompts import Needle, draw_needles, is_recalled, keys
from longrnn.errors import UserError
from longrnn.evaluation.base import Batches, Evaluation, Item, Plan, Sample, within
from longrnn.evaluation.options import PasskeyOptions
from longrnn.evaluation.texts import warn_if_calibrated_on
from longrnn.files import read_text
from longrnn.inference.chunk_select import select
from longrnn.inference.engine import complete
from longrnn.intervals import SCORE, SHARE_OF_STRETCHES
from longrnn.progress import Progress
from longrnn.reporting.tables import Column
from longrnn.results import Result
from longrnn.units import format_length

# The column of a place, which has too few prompts for an interval.
AT_PLACE = Column("", SCORE, drawn=False, brief=True)
# A prompt is short if everything but its filler is more than 1 / SHORT_RATIO of it.
SHORT_RATIO = 8


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
        task: makes the prompt.
        max_new_tokens: of the longest answer to any prompt for the model.
    """

    length: int
    place: Any
    number: int
    needles: list[Needle]
    asked: int
    start: float
    covers: float
    task: Passkey
    max_new_tokens: int = 0

    @property
    def needle(self) -> Needle:
        """The key that is queried."""
        return self.needles[self.asked]

    @property
    def label(self) -> str:
        """The place as text."""
        is_depth = isinstance(self.place, float)
        return f"depth {100 * self.place:g}%" if is_depth else format_length(self.place)


class PasskeyRetrieval(Evaluation[PasskeyOptions]):
    """Passkey retrieval, see `PasskeyOptions`."""

    def plan(self, models: Sequence[OpenCheckpoint]) -> list[Plan]:
        if self.options.insert_at is not None and self.options.n_keys > 1:
            raise UserError("--insert-at is for one key per prompt: leave --n-keys out")
        return [self._plan(model) for model in models]

    def _plan(self, model: OpenCheckpoint) -> Plan:
        options = self.options
        refuse_unfit(model.tokenizer, model.model, model.name)
        filler = [] if options.filler is None else [options.filler]
        for path in filler:
            warn_if_calibrated_on(path.name, read_text(path)[1], model.model)
        task = Passkey(model.tokenizer, filler=[*map(str, filler)], n_keys=options.n_keys)
        least, last = task.least_length(), max(options.insert_at or [0])
        if options.lengths[0] < least or options.lengths[-1] < last + least:
            raise UserError(
                f"with the tokenizer of {model.name} a prompt has at least {least} tokens, and "
                f"{last + least:,} with a key after {format_length(last)} tokens of filler: give "
                f"greater lengths than {', '.join(map(format_length, options.lengths))}"
            )
        drawn = [
            draw(task, length, place, number, options.seed, options.n_keys)
            for length, place, number in product(options.lengths, self._places(), range(options.n))
            # A length that is too short for an insertion point has no prompt with it.
            if options.insert_at is None or place + least <= length
        ]
        answer = max(len(task.answer(q.needle)) for q in drawn)
        # With chunk selection, the most that is read before an answer.
        most = task.n_header + (options.chunk_select or math.inf)
        most += max(len(task.question(q.needle)) for q in drawn)
        tokens = {length: int(min(length, most)) + answer for length in options.lengths}
        reached, reasons = within(model, tokens, self.column)
        # Prompts with the same index begin at the same place and share keys.
        items = [
            Item(
                {"length": question.length, "place": question.place, "index": question.number},
                question._replace(max_new_tokens=answer),
                (question.number, question.place),
            )
            for question in drawn
            if question.length in reached
        ]
        return Plan(items, reasons)

    def protocol(self, model: OpenCheckpoint) -> dict[str, Any]:
        filler = self.options.filler
        settings = self.options.model_dump(include={"seed", "n_keys", "chunk_select"})
        return {**settings, "filler": None if filler is None else read_text(filler)[1]}

    def measure(self, model: OpenCheckpoint, items: Sequence[Item], progress: Progress) -> Batches:
        # With chunk selection, a prompt is answered before the next one is read.
        parts = [items] if self.options.chunk_select is None else [[item] for item in items]
        for part in parts:
            answers = complete(
                model.model,
                (self._prompt(model, item.spec, progress) for item in part),
                decode=model.tokenizer.decode,
                max_new_tokens=part[0].spec.max_new_tokens,
                batch_size=self.options.batch_size,
                progress=progress,
            )
            for number, text in answers:
                key, said = part[number].spec.needle.key, text.strip()
                progress.advance(1, 0)
                yield [
                    (part[number], {"key": key, "said": said, "correct": is_recalled(said, key)})
                ]

    def _prompt(self, model: OpenCheckpoint, asked: Question, progress: Progress) -> Tensor:
        """Return what is read before the answer."""
        task = asked.task
        start = int(asked.start * task.n_filler) if task.own_filler else 0
        if self.options.chunk_select is None:
            return task.prompt_of(asked.needles, asked.asked, length=asked.length, start=start)
        context = task.context(asked.needles, asked.asked, length=asked.length, start=start)
        progress.advance(0, asked.length)
        return select(
            model.model,
            context[task.n_header :],
            task.question(asked.needle),
            chunk=self.options.chunk_select,
            prefix=context[: task.n_header],
            batch_size=self.options.batch_size,
        ).prompt

    def samples(self, item: Item, result: Result) -> Iterator[Sample]:
        asked, right = item.spec, float(result["correct"])
        name = f"{asked.place}/{asked.number}"
        if len(self._places()) > 1:
            yield Sample(AT_PLACE._replace(name=asked.label), asked.length, name, right)
        # With the built-in filler, all prompts have the same text and only the key is sampled.
        value = right if self.options.filler is None else (right, asked.start, asked.covers)
        yield Sample(self.column, asked.length, name, value)

    @property
    def column(self) -> Column:
        """The share of keys that are recalled, at all places."""
        quantity = SCORE if self.options.filler is None else SHARE_OF_STRETCHES
        return Column(f"{self.title}, keys recalled", quantity)

    def _places(self) -> list[Any]:
        """Return the insertion points, or the depths."""
        options = self.options
        return options.depths if options.insert_at is None else options.insert_at


def draw(task: Passkey, length: int, place: Any, number: int, seed: int, n_keys: int) -> Question:
    """Return a prompt's keys, all held out from training; the queried one is at `place`."""
    start, covers = random.Random(f"{seed}/{number}").random(), length / task.n_filler
    if n_keys > 1:
        rng = random.Random(f"{seed}/{place}/{number}")
        needles = draw_needles(rng, n_keys, held_out=True)
        asked = rng.randrange(n_keys)
        needles[asked] = needles[asked]._replace(depth=place)
        return Question(length, place, number, needles, asked, start, covers, task)
    is_depth = isinstance(place, float)
    token = round(place * length) if is_depth else place
    key = random.Random(f"{seed}/{token}/{number}").choice(keys(True))
    free = task.free(key, length)
    is_share = is_depth and (length - free) * SHORT_RATIO > length
    # The prompt multiplies by `free` and rounds: a quotient of integers comes back exactly.
    depth = place if is_share else min(token, free) / max(free, 1)
    return Question(length, place, number, [Needle(key, depth)], 0, start, covers, task)
