"""The cells of a passkey evaluation, and the prompts that they are made of.

Notable choices:
- Relative depths put the key at a share of the filler, so that a longer prompt has it at another
  place; absolute insertion points put it behind so many tokens of filler at every length, so that
  position of the key and distance since it come apart.
- Where header, key and question take up little of a prompt, a depth is a share of its whole length
  and not of the filler alone, so that half of 4k and a quarter of 8k are one place.
- A key depends on its place and number and on nothing else: a longer prompt with a key at the same
  place goes on from a shorter one.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import NamedTuple

from longrnn.errors import UserError
from longrnn.inference.prefix import Prompt
from longrnn.results import Row
from longrnn.seeds import check_seed
from longrnn.tasks.passkey import Passkey
from longrnn.tasks.passkey_documents import Needle, draw_needles, keys
from longrnn.text import Tokenizer, read_text
from longrnn.units import format_length

# A prompt is short where all but its filler is more than one part in so many of it.
SHORT = 8
# Of how prompts are made: rows of another version do not go on in one file.
VERSION = 3


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
    """One prompt with its key at a relative depth: the `index`-th of its cell."""

    length: int
    depth: float
    index: int

    def question(self, task: Passkey, seed: int, n_keys: int) -> Question:
        """Its keys, which training never sees; the one that is asked is at `depth`."""
        start = _start(seed, self.index)
        if n_keys == 1:
            key = _key(seed, round(self.depth * self.length), self.index)
            return Question([self._needle(task, key)], 0, start)
        rng = random.Random(f"{seed}/{self.depth}/{self.index}")
        needles = draw_needles(rng, n_keys, held_out=True)
        asked = rng.randrange(n_keys)
        needles[asked] = needles[asked]._replace(depth=self.depth)
        return Question(needles, asked, start)

    def _needle(self, task: Passkey, key: str) -> Needle:
        """A share of the length, as far as there is room; of the filler in a short prompt."""
        free = task.free(key, self.length)
        if (self.length - free) * SHORT > self.length:
            return Needle(key, self.depth)
        place = min(round(self.depth * self.length), free)
        return task.needle_at(key, place, length=self.length)


@dataclass(frozen=True)
class Inserted:
    """One prompt with its key behind `insert_at` tokens of filler: the `index`-th of its cell."""

    length: int
    insert_at: int
    index: int

    def question(self, task: Passkey, seed: int, n_keys: int) -> Question:
        """Its only key, which training never sees."""
        key = _key(seed, self.insert_at, self.index)
        needle = task.needle_at(key, self.insert_at, length=self.length)
        return Question([needle], 0, _start(seed, self.index))


def _key(seed: int, place: int, index: int) -> str:
    """A held-out key for a place."""
    return random.Random(f"{seed}/{place}/{index}").choice(keys(True))


def _start(seed: int, index: int) -> float:
    """Where in the filler the `index`-th prompts begin, as a share of it."""
    return random.Random(f"{seed}/{index}").random()


def sample_of(row: Row) -> Sample | Inserted:
    """The prompt that a row is about."""
    if "insert_at" in row:
        return Inserted(row["length"], row["insert_at"], row["index"])
    return Sample(row["length"], row["depth"], row["index"])


class Grid(NamedTuple):
    """What is asked: lengths × depths, or lengths × insertion points, `n` prompts a cell.

    Attributes:
        lengths: tokens of the prompts, exactly.
        n: prompts per cell.
        depths: where the key stands in the filler, from 0 to 1.
        insert_at: tokens of filler before the key, in place of depths; a length too short for one
            has no cell with it.
        seed: of the keys.
        filler: a text file to hide the keys in; None for the sentences that everyone uses.
        n_keys: keys in one prompt.
    """

    lengths: Sequence[int]
    n: int
    depths: Sequence[float] = ()
    insert_at: Sequence[int] = ()
    seed: int = 0
    filler: Path | None = None
    n_keys: int = 1

    def check(self) -> None:
        """Refuses values out of range."""
        check_seed(self.seed)
        if self.n < 1:
            raise UserError("n and the batch size must be at least 1: give positive numbers")
        if bool(self.depths) == bool(self.insert_at):
            raise UserError("a grid has depths or insertion points: give one of the two")
        if not all(0 <= depth <= 1 for depth in self.depths):
            raise UserError(
                "depths lie between 0 (the start of the filler) and 1 (its end): give such numbers"
            )
        if min(self.insert_at, default=0) < 0:
            raise UserError("insertion points count tokens of filler: give 0 or more")
        if self.insert_at and self.n_keys > 1:
            raise UserError("a grid of insertion points has one key a prompt: leave n_keys at 1")

    def header(self) -> Row:
        """What tells its rows from those of other grids that may not share a file."""
        header: Row = {"seed": self.seed, "version": VERSION}
        if self.insert_at:
            header["grid"] = "absolute"
        if self.n_keys > 1:
            header["n_keys"] = self.n_keys
        if self.filler is not None:
            header["filler"] = read_text(self.filler)[1]
        return header

    def samples(self, least: int) -> list[Sample | Inserted]:
        """The prompts, of which the shortest with a key behind no filler has `least` tokens.

        Raises:
            UserError: an insertion point for which no length has room.
        """
        relative = product(self.lengths, map(float, self.depths), range(self.n))
        absolute = [
            cell
            for cell in product(self.lengths, self.insert_at, range(self.n))
            if cell[1] + least <= cell[0]
        ]
        reached = {place for _, place, _ in absolute}
        for place in self.insert_at:
            if place not in reached:
                raise UserError(
                    f"a key behind {format_length(place)} tokens of filler needs a prompt of "
                    f"{place + least:,} tokens or more: give a greater length, or leave "
                    f"{format_length(place)} out"
                )
        samples = [*(Sample(*c) for c in relative), *(Inserted(*c) for c in absolute)]
        return list(dict.fromkeys(samples))


def insertion_points(step: int, longest: int, tokenizers: Iterable[Tokenizer]) -> list[int]:
    """0, `step`, 2 · `step`, …, as far as a prompt of `longest` tokens has room."""
    least = max(Passkey(tokenizer).least_length() for tokenizer in tokenizers)
    return list(range(0, max(longest - least, 0) + 1, step))


def prompts(
    task: Passkey, samples: Sequence[Sample | Inserted], asked: Sequence[Question], *, naive: bool
) -> Iterator[Prompt]:
    """The prompts of samples; where `naive`, each shares nothing with the others."""
    for index, (sample, question) in enumerate(zip(samples, asked, strict=True)):
        start = int(question.start * task.n_filler) if task.own_filler else 0
        needles = question.needles
        context = task.context(needles, question.asked, length=sample.length, start=start)
        ids = task.question(question.needle)
        if naive:
            yield Prompt(context, ids, None, 0, index)
            continue
        # Header and filler, up to the first key line. Longer texts about one key go on in one
        # branch; with several, what follows the first differs with the length.
        fork = context[0].size + context[1].size
        yield Prompt(context, ids, start, fork, needles[0].key if len(needles) == 1 else sample)
