"""The cells of a passkey evaluation and their prompts.

Notable choices:
- A relative depth puts the key at a share of the filler, so that its position grows with the
  prompt. An absolute insertion point puts the key after a fixed number of filler tokens at every
  length, which separates the position of the key from its distance to the question.
- If header, key and question are a small part of a prompt, a depth is a share of the whole length,
  so that half of 4k and a quarter of 8k are the same position.
- A key depends on its position and index only: a longer prompt with a key at the same position
  begins with a shorter one.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import NamedTuple

from longrnn.data import Passkey
from longrnn.data.prompts import Needle, draw_needles, keys
from longrnn.errors import UserError
from longrnn.inference.trie import Prompt
from longrnn.results import Row
from longrnn.seeds import check_seed
from longrnn.text import Tokenizer, read_text
from longrnn.units import check_count, format_length

# A prompt is short if everything but its filler is more than 1 / SHORT of it.
SHORT = 8
# Version of the prompts: results of different versions cannot share a file.
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


@dataclass(frozen=True)
class Sample:
    """The `index`-th prompt of a cell with the key at a relative depth."""

    length: int
    depth: float
    index: int

    @property
    def place(self) -> float:
        """Where the key is."""
        return self.depth

    def question(self, task: Passkey, seed: int, n_keys: int) -> Question:
        """Return the prompt's keys, all held out from training; the queried one is at `depth`."""
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
        """Return the key at a share of the length, or of the filler for a short prompt."""
        free = task.free(key, self.length)
        if (self.length - free) * SHORT > self.length:
            return Needle(key, self.depth)
        place = min(round(self.depth * self.length), free)
        return task.needle_at(key, place, length=self.length)


@dataclass(frozen=True)
class Inserted:
    """The `index`-th prompt of a cell with the key after `insert_at` tokens of filler."""

    length: int
    insert_at: int
    index: int

    @property
    def place(self) -> int:
        """Where the key is."""
        return self.insert_at

    def question(self, task: Passkey, seed: int, n_keys: int) -> Question:
        """Return the prompt's only key, held out from training."""
        key = _key(seed, self.insert_at, self.index)
        needle = task.needle_at(key, self.insert_at, length=self.length)
        return Question([needle], 0, _start(seed, self.index))


def _key(seed: int, place: int, index: int) -> str:
    """Draw a held-out key for a position."""
    return random.Random(f"{seed}/{place}/{index}").choice(keys(True))


def _start(seed: int, index: int) -> float:
    """Draw where in the filler the `index`-th prompts begin, as a share of the filler."""
    return random.Random(f"{seed}/{index}").random()


def sample_of(row: Row) -> Sample | Inserted:
    """Return the sample of a row."""
    if "insert_at" in row:
        return Inserted(row["length"], row["insert_at"], row["index"])
    return Sample(row["length"], row["depth"], row["index"])


class Grid(NamedTuple):
    """Prompts over lengths × depths, or lengths × insertion points, `n` per cell.

    Attributes:
        lengths: exact lengths of the prompts in tokens.
        n: prompts per cell.
        depths: positions of the key in the filler, from 0 to 1.
        insert_at: in place of depths, numbers of filler tokens before the key; lengths that are too
            short for a number have no cell with it.
        seed: seed of the keys.
        filler: a text file to hide the keys in; None for the usual sentences.
        n_keys: keys per prompt.
    """

    lengths: Sequence[int]
    n: int
    depths: Sequence[float] = ()
    insert_at: Sequence[int] = ()
    seed: int = 0
    filler: Path | None = None
    n_keys: int = 1

    def check(self) -> None:
        """Refuse values out of range."""
        check_seed(self.seed)
        check_count("n", self.n, at_most=len(keys(True)))  # more would only repeat the keys
        if bool(self.depths) == bool(self.insert_at):
            raise UserError("a grid has depths or insertion points: give one of the two")
        if not all(0 <= depth <= 1 for depth in self.depths):
            raise UserError(
                "depths lie between 0 (the start of the filler) and 1 (its end): give such numbers"
            )
        if min(self.insert_at, default=0) < 0:
            raise UserError("insertion points count tokens of filler: give 0 or more")
        if self.insert_at and self.n_keys > 1:
            raise UserError("a grid of insertion points has one key per prompt: leave n_keys at 1")

    def header(self) -> Row:
        """Return the settings that all rows of a results file must share."""
        header: Row = {"seed": self.seed, "version": VERSION}
        if self.insert_at:
            header["grid"] = "absolute"
        if self.n_keys > 1:
            header["n_keys"] = self.n_keys
        if self.filler is not None:
            header["filler"] = read_text(self.filler)[1]
        return header

    def samples(self, least: int) -> list[Sample | Inserted]:
        """Return the samples of the grid.

        Args:
            least: tokens of the shortest possible prompt.

        Raises:
            UserError: all lengths are too short for an insertion point.
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
                    f"a key after {format_length(place)} tokens of filler needs a prompt of "
                    f"{place + least:,} tokens or more: give a greater length, or leave "
                    f"{format_length(place)} out"
                )
        samples = [*(Sample(*c) for c in relative), *(Inserted(*c) for c in absolute)]
        return list(dict.fromkeys(samples))


def insertion_points(step: int, longest: int, tokenizers: Iterable[Tokenizer]) -> list[int]:
    """Return the insertion points 0, `step`, 2 · `step`, … of a prompt of `longest` tokens."""
    least = max(Passkey(tokenizer).least_length() for tokenizer in tokenizers)
    return list(range(0, max(longest - least, 0) + 1, step))


def prompts(
    task: Passkey,
    samples: Sequence[Sample | Inserted],
    questions: Sequence[Question],
    *,
    naive: bool,
) -> Iterator[Prompt]:
    """Yield the prompts of samples; if `naive`, they share no prefixes."""
    for index, (sample, question) in enumerate(zip(samples, questions, strict=True)):
        start = int(question.start * task.n_filler) if task.own_filler else 0
        needles = question.needles
        context = task.context(needles, question.asked, length=sample.length, start=start)
        ids = task.question(question.needle)
        if naive:
            yield Prompt(context, ids, None, 0, index)
            continue
        # The fork is after header and filler, at the first key line. Prompts with the same single
        # key share a branch; with several keys, the text after the first depends on the length.
        fork = context[0].size + context[1].size
        yield Prompt(context, ids, start, fork, needles[0].key if len(needles) == 1 else sample)
