"""Needles in a haystack after RULER (arXiv 2404.06654), as texts: nothing is downloaded.

Four tasks hide sentences such as `One of the special magic numbers for amber-otter is: 4178332.`
and ask for the numbers: one key (`single`), one of several keys (`multikey`), all numbers of one
key (`multivalue`), those of several keys (`multiquery`). `variables` hides a chain of assignments
and asks for all variables with the value at its start, after a worked example.

Where this differs from RULER: keys are drawn from the word lists below, and the haystack is the
passkey's filler or a text file, word by word.
"""

from __future__ import annotations

import math
import random
import string
from itertools import pairwise, product
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
# Variables of a chain of assignments.
CHAIN = 5
# Units of the haystack in the worked example that comes before the question about variables.
EXAMPLE_UNITS = 5
# Hidden keys, numbers of each, and how many keys are asked for.
KINDS = {
    "single": (1, 1, 1),
    "multikey": (4, 1, 1),
    "multivalue": (1, 4, 1),
    "multiquery": (4, 1, 4),
}


class Puzzle(NamedTuple):
    """What is hidden in a haystack, and asked for.

    Attributes:
        before: the text in front of the haystack.
        lines: hidden lines.
        depths: where they are, from 0 to 1, ascending.
        question: the text after the haystack.
        prefix: how the answer begins.
        outputs: what it must name.
    """

    before: str
    lines: list[str]
    depths: list[float]
    question: str
    prefix: str
    outputs: list[str]

    def text(self, haystack: Haystack, count: int) -> str:
        """Return the text with `count` units of a haystack."""
        parts, done = [], 0
        for line, depth in zip(self.lines, self.depths, strict=True):
            place = round(depth * count)
            parts += [*haystack.units(done, place), line]
            done = place
        hidden = " ".join([*parts, *haystack.units(done, count)])
        return f"{self.before}{hidden}{self.question}"


class Haystack:
    """Units of text to hide lines between.

    Args:
        path: a text file, whose words are the units; None for the passkey's filler, whose
            sentences are, over and over.
    """

    def __init__(self, path: Path | None = None) -> None:
        self.path = path
        sentences = [f"{one.rstrip('.')}." for one in FILLER.strip().split(". ")]
        self.words = read_text(path)[0].split() if path else sentences

    def units(self, start: int, stop: int) -> list[str]:
        """Return the units from one index up to another.

        Raises:
            UserError: the text is too short.
        """
        if self.path is not None and stop > len(self.words):
            raise UserError(
                f"{self.path} has {len(self.words):,} words, too few for the length asked: give a "
                "longer text or a smaller length"
            )
        return [self.words[index % len(self.words)] for index in range(start, stop)]


def puzzle(kind: str, rng: random.Random) -> Puzzle:
    """Return a puzzle of one of KINDS, or of `variables`."""
    if kind == "variables":
        worked = _chain(rng)
        answer = f" {worked.prefix} {', '.join(worked.outputs)}\n\n"
        found = _chain(rng)
        return found._replace(before=worked.text(Haystack(), EXAMPLE_UNITS) + answer + found.before)
    count, values_each, n_asked = KINDS[kind]
    pairs = [*product(FIRST.split(), SECOND.split())]
    keys = ["-".join(pair) for pair in rng.sample(pairs, count)]
    values = {
        key: [str(rng.randint(1_000_000, 9_999_999)) for _ in range(values_each)] for key in keys
    }
    lines = [LINE.format(key=key, value=value) for key in keys for value in values[key]]
    rng.shuffle(lines)
    depths = sorted(rng.random() for _ in lines)
    asked = rng.sample(keys, n_asked)
    outputs = [value for key in asked for value in values[key]]
    numbers, are = ("numbers", "are") if len(outputs) > 1 else ("number", "is")
    words = {"numbers": numbers, "are": are, "keys": ", ".join(asked)}
    return Puzzle(TASK, lines, depths, QUESTION.format(**words), ANSWER.format(**words), outputs)


def _chain(rng: random.Random) -> Puzzle:
    """Return a chain of assignments; all variables have the value of the first."""
    names: list[str] = []
    while len(names) < CHAIN:
        name = "".join(rng.choices(string.ascii_uppercase, k=5))
        if name not in names:
            names.append(name)
    depths = sorted(rng.random() for _ in names)
    value = str(rng.randint(10_000, 99_999))
    lines = [f"VAR {names[0]} = {value}.", *(f"VAR {b} = VAR {a}." for a, b in pairwise(names))]
    prefix = TRACK_ANSWER.format(count=len(names), value=value)
    return Puzzle(TRACK, lines, depths, TRACK_QUESTION.format(value=value), prefix, names)


def fitted(asked: Puzzle, haystack: Haystack, tokenizer: Tokenizer, length: int) -> str:
    """Return the text of a puzzle with as many units of a haystack as fit.

    Args:
        asked: the puzzle.
        haystack: what to hide it in.
        tokenizer: counts the tokens.
        length: tokens of the text and the beginning of its answer, at most and nearly.

    Raises:
        UserError: the length is too short, or too long for the haystack.
    """

    def size(count: int) -> int:
        return len(tokenizer.encode(f"{asked.text(haystack, count)} {asked.prefix}"))

    least = size(0)
    if length < least:
        raise UserError(
            f"length {length} is too short: with this tokenizer the least is {least}, give that or "
            "more"
        )
    each = (size(EXAMPLE_UNITS) - least) / EXAMPLE_UNITS
    count = int((length - least) / each)
    # Correct the count by the true size of a unit, then down to what fits.
    count += int((length - size(count)) / each)
    while count > 0 and (excess := size(count) - length) > 0:
        count = max(0, count - math.ceil(excess / each))
    return asked.text(haystack, count)
