"""Needles in a haystack after RULER (arXiv 2404.06654), as texts: nothing is downloaded.

Four tasks hide sentences such as `One of the special magic numbers for amber-otter is: 4178332.`
and ask for the numbers: one key (`single`), one of several keys (`multikey`), all numbers of one
key (`multivalue`), those of several keys (`multiquery`). `variable_tracking` hides a chain of
assignments and asks for all variables with the value at its start.

Where this differs from RULER: keys are drawn from the word lists below, and the haystack is the
passkey's filler or a text file, word by word.
"""

from __future__ import annotations

import math
import random
import string
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from longrnn.data.prompts import FILLER
from longrnn.errors import UserError
from longrnn.text import Tokenizer, read_text

TASK = (
    "Some special magic numbers are hidden within the following text. Make sure to memorize it. "
    "I will quiz you about the numbers afterwards.\n"
)
LINE = "One of the special magic numbers for {key} is: {value}."
QUESTION = "\nWhat {are} the special magic {numbers} for {keys} mentioned in the provided text?"
ANSWER = "The special magic {numbers} for {keys} mentioned in the provided text {are}"
TRACK = "Memorize and track the chain(s) of variable assignment hidden in the following text.\n\n"
TRACK_QUESTION = (
    "\nQuestion: Find all variables that are assigned the value {value} in the text above."
)
TRACK_ANSWER = (
    "Answer: According to the chain(s) of variable assignment in the text above, {count} variables "
    "are assigned the value {value}, they are:"
)
FIRST = (
    "amber ancient brave bright calm clever cold crimson curious distant eager early faint fierce "
    "gentle golden grand hidden hollow humble jolly keen lazy little lucky merry misty narrow "
    "noble patient plain proud quick quiet rapid rough rusty silent silver simple sleepy smooth "
    "solid steep stormy strange sunny swift tall tiny vivid warm wild wise wooden young"
)
SECOND = (
    "anchor apple arrow badger basket beacon bishop bottle bridge candle canyon castle cedar "
    "cherry cloud comet copper desert dragon eagle engine falcon feather forest garden glacier "
    "hammer harbor helmet island jacket kettle ladder lantern lemon lizard magnet maple marble "
    "meadow mirror needle orchard otter palace parrot pebble pepper pillow planet river rocket "
    "saddle shadow temple thunder tiger tunnel turtle valley violin window"
)
# Numbers of seven digits, and values of five for the variables.
LOW, HIGH = 1_000_000, 9_999_999
HOPS = 4
# Haystack of the worked example that comes before the question about variables.
EXAMPLE_UNITS = 5


class Counts(NamedTuple):
    """How many keys are hidden, numbers each has, and keys that are asked."""

    keys: int
    values: int
    asked: int


KINDS = {
    "single": Counts(1, 1, 1),
    "multikey": Counts(4, 1, 1),
    "multivalue": Counts(1, 4, 1),
    "multiquery": Counts(4, 1, 4),
}


class Example(NamedTuple):
    """A text with its question, how the answer begins, and all that it must name."""

    text: str
    prefix: str
    outputs: list[str]


class Haystack:
    """Units of text to hide lines between.

    Args:
        path: a text file, whose words are the units; None for the passkey's filler, whose
            sentences are, over and over.
    """

    def __init__(self, path: Path | None = None) -> None:
        self.path = path
        self.units = read_text(path)[0].split() if path else FILLER.strip().split(". ")
        if path is None:
            self.units = [f"{unit.rstrip('.')}." for unit in self.units]

    def hide(self, count: int, lines: Sequence[str], depths: Sequence[float]) -> str:
        """`count` units with lines between them, at rising depths from 0 to 1."""
        if self.path is not None and count > len(self.units):
            raise UserError(
                f"{self.path} has {len(self.units):,} words, too few for the length asked: give a "
                "longer text or a smaller length"
            )
        parts, before = [], 0
        for line, depth in zip(lines, depths, strict=True):
            place = round(depth * count)
            parts += [self._unit(i) for i in range(before, place)]
            parts.append(line)
            before = place
        return " ".join([*parts, *(self._unit(i) for i in range(before, count))])

    def _unit(self, index: int) -> str:
        return self.units[index % len(self.units)]


def needles(kind: str, haystack: Haystack, tokenizer: Tokenizer, length: int, name: str) -> Example:
    """One text of a kind of KINDS.

    Args:
        kind: which.
        haystack: what to hide in.
        tokenizer: that counts the tokens.
        length: tokens of the text and the beginning of its answer, at most and nearly.
        name: what the randomness is a function of.

    Raises:
        UserError: a length too short for the needles.
    """
    rng, counts = random.Random(f"{name}/{kind}/{length}"), KINDS[kind]
    pairs = [(first, second) for first in FIRST.split() for second in SECOND.split()]
    keys = ["-".join(pair) for pair in rng.sample(pairs, counts.keys)]
    values = {key: [str(rng.randint(LOW, HIGH)) for _ in range(counts.values)] for key in keys}
    lines = [LINE.format(key=key, value=value) for key in keys for value in values[key]]
    rng.shuffle(lines)
    depths = sorted(rng.random() for _ in lines)
    asked = rng.sample(keys, counts.asked)
    outputs = [value for key in asked for value in values[key]]
    several = len(outputs) > 1
    words = {
        "numbers": "numbers" if several else "number",
        "are": "are" if several else "is",
        "keys": ", ".join(asked),
    }
    prefix = ANSWER.format(**words)

    def text(count: int) -> str:
        return TASK + haystack.hide(count, lines, depths) + QUESTION.format(**words)

    return Example(_fitted(text, prefix, tokenizer, length), prefix, outputs)


def variable_tracking(
    haystack: Haystack, tokenizer: Tokenizer, length: int, name: str, *, hops: int = HOPS
) -> Example:
    """One text with a chain of `hops` assignments behind the first, see `needles`."""
    rng = random.Random(f"{name}/variables/{length}")
    worked = _chain(rng, Haystack(), hops)
    example = f"{worked(EXAMPLE_UNITS)} {worked.prefix} {', '.join(worked.names)}\n\n"
    chain = _chain(rng, haystack, hops)
    text = _fitted(lambda count: example + chain(count), chain.prefix, tokenizer, length)
    return Example(text, chain.prefix, chain.names)


class _Chain(NamedTuple):
    haystack: Haystack
    names: list[str]
    value: str
    depths: list[float]

    @property
    def prefix(self) -> str:
        return TRACK_ANSWER.format(count=len(self.names), value=self.value)

    def __call__(self, count: int) -> str:
        """The text with `count` units of haystack."""
        lines = [f"VAR {self.names[0]} = {self.value}."]
        lines += [f"VAR {b} = VAR {a}." for a, b in zip(self.names, self.names[1:], strict=False)]
        hidden = self.haystack.hide(count, lines, self.depths)
        return TRACK + hidden + TRACK_QUESTION.format(value=self.value)


def _chain(rng: random.Random, haystack: Haystack, hops: int) -> _Chain:
    names: list[str] = []
    while len(names) <= hops:
        name = "".join(rng.choices(string.ascii_uppercase, k=5))
        if name not in names:
            names.append(name)
    depths = sorted(rng.random() for _ in names)
    return _Chain(haystack, names, str(rng.randint(10_000, 99_999)), depths)


def _fitted(build: Callable[[int], str], prefix: str, tokenizer: Tokenizer, length: int) -> str:
    """The text with as many units of haystack as leave it, and the prefix, `length` tokens."""

    def size(count: int) -> int:
        return len(tokenizer.encode(f"{build(count)} {prefix}"))

    least = size(0)
    if length < least:
        raise UserError(
            f"length {length} is too short: with this tokenizer the least is {least}, give that or "
            "more"
        )
    each = (size(EXAMPLE_UNITS) - least) / EXAMPLE_UNITS
    count = int((length - least) / each)
    # A second look at the true cost of a unit, then down to what fits.
    count += int((length - size(count)) / each)
    while count > 0 and (excess := size(count) - length) > 0:
        count = max(0, count - math.ceil(excess / each))
    return build(count)
