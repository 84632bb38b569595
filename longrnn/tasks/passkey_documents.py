"""Passkey documents that continue over segments, as streams read them.

Notable choices:
- The question follows some segments, on a fork of the state: the answer never enters the carried
  state, so the key must be remembered from its own line. It follows 0, 1, 2, 4, 8, … segments
  after that line: with a question at every step of a long document, the weights would memorize the
  key instead of the state.
- A segment that holds only filler may be repeated in closed form (see `longrnn.training.repeat`),
  so that few segments represent a long document.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from longrnn.errors import UserError


def is_recalled(generated: str, key: str) -> bool:
    """Whether a generated answer begins with the key, the criterion of every passkey score."""
    return generated.strip().startswith(key)


def is_held_out(key: str) -> bool:
    """Whether a key is kept for evaluation: one in eight, by the first byte of its SHA-256."""
    return hashlib.sha256(key.encode()).digest()[0] % 8 == 0


@lru_cache(maxsize=2)
def keys(held_out: bool) -> tuple[str, ...]:
    """All keys of one side of the split, in order."""
    return tuple(k for k in (f"{i:05d}" for i in range(100_000)) if is_held_out(k) == held_out)


def with_numbers(text: str, every: int) -> str:
    """A text with numbers of one to six digits between its words, the same ones every time.

    In most texts digits are rare. A model can then remember every digit to remember a key, which
    fails in a text with many other digits.

    Args:
        text: any text.
        every: characters of the text per number, on average.

    Raises:
        UserError: `every` is below 1.
    """
    if every < 1:
        raise UserError(f"numbers_every must be at least 1, not {every}: set a positive number")
    rng = random.Random(every)
    words = text.split(" ")
    share = len(text) / len(words) / every
    return " ".join(
        f"{word} {rng.randrange(10 ** rng.randint(1, 6))}" if rng.random() < share else word
        for word in words
    )


class Needle(NamedTuple):
    """A key in its line.

    Attributes:
        key: five digits.
        depth: where the line stands in the filler around it, from 0 (its start) to 1 (its end).
        number: by which the question names it; 0 for the only key of a text.
    """

    key: str
    depth: float
    number: int = 0


def draw_needles(rng: random.Random, count: int, *, held_out: bool = False) -> list[Needle]:
    """`count` different keys at random depths, numbered from 1 where there are several."""
    return numbered([(key, rng.random()) for key in rng.sample(keys(held_out), count)])


def numbered(placed: Sequence[tuple[str, float]]) -> list[Needle]:
    """Keys and their depths as needles, numbered from 1 where there are several."""
    numbers = range(1, len(placed) + 1) if len(placed) > 1 else [0]
    return [Needle(key, depth, n) for (key, depth), n in zip(placed, numbers, strict=True)]


class Document(NamedTuple):
    """A document of one stream.

    Attributes:
        start: the step of its first segment.
        needles: its keys, all in one segment.
        asked: indices of the needles that the questions name, in their order.
        key_segment: index of the segment that holds them.
        repeats: repetitions of each segment.
        filler: index in the filler at which the document begins.
    """

    start: int
    needles: list[Needle]
    asked: list[int]
    key_segment: int
    repeats: list[int]
    filler: int

    @property
    def end(self) -> int:
        """The step after its last segment."""
        return self.start + len(self.repeats)

    def asks(self, index: int) -> bool:
        """Whether the question follows the segment `index`."""
        since = index - self.key_segment
        return since >= 0 and since & (since - 1) == 0


class Drawing(NamedTuple):
    """The distribution of documents.

    Attributes:
        min_segments: length of the shortest document.
        max_segments: length of the longest; lengths are log-uniform.
        max_repeat: largest number of repetitions of a segment of filler, log-uniform.
        grow_steps: segments of a stream over which lengths and repeats grow to their full range.
        n_keys: numbers of keys to draw from.
        n_queries: number of keys that are queried, where there are as many.
        n_filler: tokens of filler to begin at; 1 to begin at its start.
    """

    min_segments: int
    max_segments: int
    max_repeat: int
    grow_steps: int
    n_keys: Sequence[int]
    n_queries: int
    n_filler: int

    def check(self) -> None:
        """Raises UserError for values out of range."""
        if not 1 <= self.min_segments <= self.max_segments:
            raise UserError(
                f"passkey needs 1 <= min_segments <= max_segments, not {self.min_segments} and "
                f"{self.max_segments}: set them in this order"
            )
        if self.max_repeat < 1 or self.grow_steps < 0:
            raise UserError("max_repeat must be at least 1 and grow_steps at least 0: set them so")

    def queried(self, rng: random.Random, count: int) -> list[int]:
        """Indices of the keys that are queried in a text of `count` keys, in their order."""
        # A sample of one would draw other numbers than the recorded runs with one query did.
        if self.n_queries == 1:
            return [rng.randrange(count)]
        return rng.sample(range(count), min(self.n_queries, count))

    def document(self, start: int, rng: random.Random) -> Document:
        """The document that begins at step `start`."""
        grown = min(1.0, start / self.grow_steps) if self.grow_steps else 1.0
        span = (self.max_segments + 1) / self.min_segments
        segments = int(self.min_segments * span ** (grown * rng.random()))
        # Half of the documents begin with their key, so that the longest distances occur too.
        key_segment = rng.choice([0, rng.randrange(segments)])
        needles = draw_needles(rng, rng.choice(self.n_keys))
        # The beginning of a document and its keys are not repeated.
        repeats = [
            1 if index in (0, key_segment) else int(self.max_repeat ** (grown * rng.random()))
            for index in range(segments)
        ]
        asked = self.queried(rng, len(needles))
        return Document(start, needles, asked, key_segment, repeats, rng.randrange(self.n_filler))
