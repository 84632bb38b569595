"""Prompts of passkey retrieval, put together from token ids; see `longrnn.data.passkey`."""

import hashlib
import random
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from longrnn.errors import LengthError, UserError
from longrnn.text import Tokenizer, with_bos

PROMPT_HEADER = "Something important is hidden in the text below. Remember it.\n"
FILLER = (
    "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again. "
)
KEY_LINE = "\nThe passkey is {key}. Remember it. {key} is the passkey.\n"
QUESTION = "\nWhat is the passkey? The passkey is"
ANSWER = " {key}"
NUMBERED_KEY_LINE = "\nPasskey {number}:{key}. Remember it. {number}:{key}.\n"
NUMBERED_QUESTION = "\nWhat is passkey {number}? Passkey {number}:"
NUMBERED_ANSWER = "{key}"


class Needle(NamedTuple):
    """A key in its line.

    Attributes:
        key: five digits.
        depth: where the line is in the filler around it, from 0 (its start) to 1 (its end).
        number: by which the question names it; 0 for the only key of a text.
    """

    key: str
    depth: float
    number: int = 0


@lru_cache(maxsize=2)
def keys(held_out: bool) -> tuple[str, ...]:
    """All keys of one side of the split, in order: one in eight is kept for evaluation."""
    every = (f"{number:05d}" for number in range(100_000))
    sides = ((key, hashlib.sha256(key.encode()).digest()[0] % 8 == 0) for key in every)
    return tuple(key for key, is_held_out in sides if is_held_out == held_out)


def draw_needles(rng: random.Random, count: int, *, held_out: bool = False) -> list[Needle]:
    """`count` different keys at random depths, numbered from 1 where there are several."""
    return numbered([(key, rng.random()) for key in rng.sample(keys(held_out), count)])


def numbered(placed: Sequence[tuple[str, float]]) -> list[Needle]:
    """Keys and their depths as needles, numbered from 1 where there are several."""
    numbers = range(1, len(placed) + 1) if len(placed) > 1 else [0]
    return [Needle(key, depth, n) for (key, depth), n in zip(placed, numbers, strict=True)]


def is_recalled(generated: str, key: str) -> bool:
    """Whether a generated answer begins with the key, the criterion of every passkey score."""
    return generated.strip().startswith(key)


class PasskeyPrompts:
    """Builds prompts of an exact number of tokens.

    Args:
        tokenizer: makes the ids.
        filler: the text between the keys, repeated as often as needed.
        most_keys: the largest number of keys in one text.

    Attributes:
        n_filler: tokens of filler before it repeats.
    """

    def __init__(self, tokenizer: Tokenizer, filler: str, most_keys: int) -> None:
        self.tokenizer, self.most_keys = tokenizer, most_keys
        self._header = torch.tensor(with_bos(tokenizer.encode(PROMPT_HEADER), tokenizer))
        self._filler = self.ids(filler)
        self.n_header, self.n_filler = len(self._header), len(self._filler)
        if self.n_filler == 0:
            raise UserError("passkey needs a filler: name text files, or leave filler out")

    def prompt_of(
        self, needles: Sequence[Needle], queried: int, *, length: int, start: int = 0
    ) -> Tensor:
        """One prompt of exactly `length` tokens.

        Args:
            needles: the keys.
            queried: index of the key that the question names.
            length: number of tokens with the question, without the answer.
            start: where in the filler the prompt begins.

        Raises:
            LengthError: the length is too short for the keys.
        """
        context = self.context(needles, queried, length=length, start=start)
        return torch.cat([context, self.question(needles[queried])])

    def context(
        self, needles: Sequence[Needle], queried: int, *, length: int, start: int = 0
    ) -> Tensor:
        """The part of `prompt_of` before the question: the header, then filler and keys."""
        room = length - self.n_header - len(self.question(needles[queried]))
        return torch.cat([self._header, self.hidden(needles, start, room, length)])

    def question(self, needle: Needle) -> Tensor:
        """The ids of the question, `(q,)`."""
        text = NUMBERED_QUESTION.format(number=needle.number) if needle.number else QUESTION
        return self.ids(text)

    def answer(self, needle: Needle) -> Tensor:
        """The ids of the right answer, `(k,)`."""
        return self.ids((NUMBERED_ANSWER if needle.number else ANSWER).format(key=needle.key))

    def line(self, needle: Needle) -> Tensor:
        """The ids of the line that states a key."""
        form = NUMBERED_KEY_LINE if needle.number else KEY_LINE
        return self.ids(form.format(key=needle.key, number=needle.number))

    def free(self, key: str, length: int) -> int:
        """Tokens of filler in a prompt of `length` tokens with this key; negative if too short."""
        alone = Needle(key, 0.0)
        return length - self.n_header - len(self.line(alone)) - len(self.question(alone))

    def least_length(self) -> int:
        """The shortest length that has room for any keys."""
        held_out, least = keys(True), 0
        for first in range(0, len(held_out) - 9, 97):
            chosen = held_out[first : first + self.most_keys]
            needles = numbered([(key, 0.5) for key in chosen])
            lines = sum(len(self.line(needle)) for needle in needles)
            least = max(least, self.n_header + lines + len(self.question(needles[-1])))
        return least

    def hidden(
        self,
        needles: Sequence[Needle],
        start: int,
        room: int,
        length: int,
        filler: Tensor | None = None,
    ) -> Tensor:
        """`room` tokens of filler and key lines; `start` counts through the filler.

        Args:
            needles: the keys.
            start: where in the filler the first token is.
            room: tokens to return.
            length: of the whole text, for the error.
            filler: ids in the place of the filler, `(t,)`.

        Raises:
            LengthError: there is no room for the keys.
        """
        lines = [self.line(needle) for needle in needles]
        free = room - sum(map(len, lines))
        if free < 0:
            raise LengthError(
                f"the keys of a passkey text need at least {length - free} tokens with this "
                f"tokenizer, not {length}: use a greater length, or fewer keys"
            )
        source = self._filler if filler is None else filler
        filler = source[torch.arange(start, start + free) % len(source)]
        parts, used = [], 0
        for index in sorted(range(len(needles)), key=lambda i: needles[i].depth):
            place = round(needles[index].depth * free)
            parts += [filler[used:place], lines[index]]
            used = place
        return torch.cat([*parts, filler[used:]])

    def ids(self, text: str) -> Tensor:
        """The ids of a text."""
        return torch.tensor(self.tokenizer.encode(text), dtype=torch.long)
