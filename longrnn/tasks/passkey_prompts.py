"""Prompts of passkey retrieval, put together from token ids."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from longrnn.errors import UserError
from longrnn.tasks.passkey_documents import Needle, keys, numbered
from longrnn.tasks.repeated import RepeatedTokens, read, whole
from longrnn.text import Tokenizer

HEADER = "Something important is hidden in the text below. Remember it.\n"
FILLER = (
    "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again. "
)
KEY_LINE = "\nThe passkey is {key}. Remember it. {key} is the passkey.\n"
QUESTION = "\nWhat is the passkey? The passkey is"
ANSWER = " {key}"
NUMBERED_KEY_LINE = "\nPasskey {number}:{key}. Remember it. {number}:{key}.\n"
NUMBERED_QUESTION = "\nWhat is passkey {number}? Passkey {number}:"
NUMBERED_ANSWER = "{key}"


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
        self._header = self._ids(HEADER)
        self._filler = self._ids(filler)
        self.n_header, self.n_filler = len(self._header), len(self._filler)
        if self.n_filler == 0:
            raise UserError("passkey needs a filler: name text files, or leave filler out")

    def prompt(self, key: str, *, length: int, depth: float) -> Tensor:
        """One prompt of exactly `length` tokens about one key, see `prompt_of`."""
        return self.prompt_of([Needle(key, depth)], 0, length=length)

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
            UserError: the length is too short for the keys.
        """
        context = self.context(needles, queried, length=length, start=start)
        return torch.cat([read(context), self.question(needles[queried])])

    def context(
        self, needles: Sequence[Needle], queried: int, *, length: int, start: int = 0
    ) -> list[RepeatedTokens]:
        """The part of `prompt_of` before the question: the header, then filler and keys."""
        room = length - len(self._header) - len(self.question(needles[queried]))
        return [whole(self._header), *self._hidden(needles, start, room, length)]

    def question(self, needle: Needle) -> Tensor:
        """The ids of the question, `(q,)`."""
        return self._ids(
            NUMBERED_QUESTION.format(number=needle.number) if needle.number else QUESTION
        )

    def answer(self, needle: Needle) -> Tensor:
        """The ids of the right answer, `(k,)`."""
        return self._ids((NUMBERED_ANSWER if needle.number else ANSWER).format(key=needle.key))

    def needle_at(self, key: str, insert_at: int, *, length: int) -> Needle:
        """The single key of a prompt of `length` tokens, after `insert_at` tokens of filler.

        Raises:
            UserError: the length is too short.
        """
        free = self.free(key, length)
        if not 0 <= insert_at <= free:
            least = length - free + insert_at
            raise UserError(
                f"{insert_at} tokens of filler before a key need a longer prompt: use a length of "
                f"{least} or more"
            )
        # `_hidden` multiplies by `free` and rounds: a quotient of integers comes back exactly.
        return Needle(key, insert_at / free if free else 0.0)

    def free(self, key: str, length: int) -> int:
        """Tokens of filler in a prompt of `length` tokens with this key; negative if too short."""
        alone = Needle(key, 0.0)
        return length - len(self._header) - len(self._line(alone)) - len(self.question(alone))

    def least_length(self) -> int:
        """The shortest length that has room for any keys."""
        held_out = keys(True)
        return max(self._least(held_out[i : i + 9]) for i in range(0, len(held_out) - 9, 97))

    def _least(self, chosen: Sequence[str]) -> int:
        needles = numbered([(key, 0.5) for key in chosen[: self.most_keys]])
        lines = sum(len(self._line(needle)) for needle in needles)
        return len(self._header) + lines + len(self.question(needles[-1]))

    def _line(self, needle: Needle) -> Tensor:
        form = NUMBERED_KEY_LINE if needle.number else KEY_LINE
        return self._ids(form.format(key=needle.key, number=needle.number))

    def _hidden(
        self, needles: Sequence[Needle], start: int, room: int, length: int
    ) -> list[RepeatedTokens]:
        """`room` tokens of filler and key lines; `start` counts through the filler."""
        lines = [self._line(needle) for needle in needles]
        free = room - sum(map(len, lines))
        if free < 0:
            raise UserError(
                f"the keys of a passkey text need at least {length - free} tokens with this "
                f"tokenizer, not {length}: use a greater length, or fewer keys"
            )
        parts, before = [], 0
        for index in sorted(range(len(needles)), key=lambda i: needles[i].depth):
            place = round(needles[index].depth * free)
            parts += [
                RepeatedTokens(self._filler, start + before, place - before),
                whole(lines[index]),
            ]
            before = place
        return [*parts, RepeatedTokens(self._filler, start + before, free - before)]

    def _ids(self, text: str) -> Tensor:
        return torch.tensor(self.tokenizer.encode(text), dtype=torch.long)
