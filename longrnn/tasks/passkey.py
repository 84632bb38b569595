"""Passkey retrieval: five-digit keys in a long filler, one asked at the end (arXiv 2305.16300).

Notable choices:
- Prompts are put together from token ids, so that a prompt has exactly the length asked, with any
  tokenizer.
- Keys are split by a hash into those to train on and those to evaluate. A split by a digit would
  train a model that can never say that digit.
- Where a text holds several keys they are numbered, in a form in which the number stands next to
  the digits: what is measured is memory, not reading.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from longrnn.errors import UserError
from longrnn.tasks.base import TASKS, UNSCORED, Batch, Task, exact_match
from longrnn.tasks.passkey_documents import (
    Document,
    Drawing,
    Needle,
    draw_needles,
    keys,
    numbered,
    with_numbers,
)
from longrnn.tasks.repeated import RepeatedTokens, read, whole
from longrnn.text import ByteTokenizer, Tokenizer, read_text

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


@TASKS.register("passkey")
class Passkey(Task):
    """Recall a key across filler.

    With a header `H…`, the filler `f…`, the key line `K…`, and the question `Q…`, one row is

        tokens   H H f f f K K f f f f f Q Q   4 2 7 1
        targets  H f f f K K f f f f f Q Q _ 4 2 7 1 9
        answer   . . . . . . . . . . . . . x x x x x x

    where the prompt (up to and including Q) has exactly `length` tokens, the targets are the next
    tokens, and `_` stands for the space before the key.

    Args:
        tokenizer: any; None for bytes.
        answer_weight: the loss is text_weight times the mean over the text plus this times that
            over the answer.
        text_weight: see answer_weight.
        n_keys: keys in one text, of which one is asked; a list to draw their number from.
        min_segments: of the shortest document of `segment`.
        max_segments: of the longest one; lengths are log-uniform.
        max_repeat: how often a segment of filler counts at most; log-uniform. Above 1 only for
            cells that are scanned.
        grow_steps: segments of a stream over which the longest document grows from `min_segments` to
            `max_segments`, and repeats from 1 to `max_repeat`.
        filler: UTF-8 text files to take the filler from, over and over, from a place that is drawn;
            None for `FILLER`.
        numbers_every: puts a random number between two words of the filler, once in so many
            characters in the mean; None for the filler as it is.

    Attributes:
        n_filler: tokens of filler before it begins anew.
    """

    default_length = 256

    def __init__(
        self,
        tokenizer: Tokenizer | None = None,
        *,
        answer_weight: float = 1.0,
        text_weight: float = 1.0,
        n_keys: int | list[int] = 1,
        min_segments: int = 1,
        max_segments: int = 64,
        max_repeat: int = 1,
        grow_steps: int = 0,
        filler: str | list[str] | None = None,
        numbers_every: int | None = None,
    ) -> None:
        self.tokenizer = tokenizer or ByteTokenizer()
        self.vocab_size = self.tokenizer.vocab_size
        for name, weight in (("answer_weight", answer_weight), ("text_weight", text_weight)):
            if not 0 <= weight < float("inf"):
                raise UserError(f"{name} must be at least 0 and finite, not {weight}: give 1.0")
        self.n_keys = [n_keys] if isinstance(n_keys, int) else n_keys
        if not self.n_keys or not all(1 <= count <= 9 for count in self.n_keys):
            raise UserError(
                f"n_keys must be from 1 to 9, not {n_keys}: set a number of keys, or a list of them"
            )
        self.answer_weight, self.text_weight = answer_weight, text_weight
        files = [filler] if isinstance(filler, str) else filler
        text = FILLER if files is None else "".join(read_text(Path(file))[0] for file in files)
        if numbers_every is not None:
            text = with_numbers(text, numbers_every)
        self._header = self._ids(HEADER)
        self._filler = self._ids(text)
        self.n_header, self.n_filler = len(self._header), len(self._filler)
        if self.n_filler == 0:
            raise UserError("passkey needs a filler: name text files, or leave filler out")
        self.drawing = Drawing(
            min_segments, max_segments, max_repeat, grow_steps, self.n_keys, self.n_filler
        )
        self.drawing.check()
        self.own_filler = files is not None
        self._sha256 = hashlib.sha256(text.encode()).hexdigest() if files else ""
        self._streams: dict[tuple[int, int], list[Document]] = {}

    # Prompts

    def prompt(self, key: str, *, length: int, depth: float) -> Tensor:
        """One prompt of exactly `length` tokens about one key, see `prompt_of`."""
        return self.prompt_of([Needle(key, depth)], 0, length=length)

    def prompt_of(
        self, needles: Sequence[Needle], asked: int, *, length: int, start: int = 0
    ) -> Tensor:
        """One prompt of exactly `length` tokens.

        Args:
            needles: the keys.
            asked: index of the one that is asked.
            length: tokens, the question included and the answer not.
            start: where in the filler the prompt begins.

        Raises:
            UserError: a length too short to hold the keys.
        """
        context = self.context(needles, asked, length=length, start=start)
        return torch.cat([read(context), self.question(needles[asked])])

    def context(
        self, needles: Sequence[Needle], asked: int, *, length: int, start: int = 0
    ) -> list[RepeatedTokens]:
        """What comes before the question of `prompt_of`: the header, then filler and keys."""
        room = length - len(self._header) - len(self.question(needles[asked]))
        return [whole(self._header), *self._hidden(needles, start, room, length)]

    def question(self, needle: Needle) -> Tensor:
        """The ids of what is asked, `(q,)`."""
        return self._ids(
            NUMBERED_QUESTION.format(number=needle.number) if needle.number else QUESTION
        )

    def answer(self, needle: Needle) -> Tensor:
        """The ids of the right answer, `(k,)`."""
        return self._ids((NUMBERED_ANSWER if needle.number else ANSWER).format(key=needle.key))

    def needle_at(self, key: str, insert_at: int, *, length: int) -> Needle:
        """The only key of a prompt of `length` tokens, behind `insert_at` tokens of filler.

        Raises:
            UserError: a length without room for that.
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
        """Tokens of filler in a prompt of `length` tokens with this key only; negative for none."""
        alone = Needle(key, 0.0)
        return length - len(self._header) - len(self._line(alone)) - len(self.question(alone))

    def least_length(self) -> int:
        """The shortest prompt that holds any keys."""
        held_out = keys(True)
        return max(self._least(held_out[i : i + 9]) for i in range(0, len(held_out) - 9, 97))

    def _least(self, chosen: Sequence[str]) -> int:
        needles = numbered([(key, 0.5) for key in chosen[: max(self.n_keys)]])
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
        spans, before = [], 0
        for index in sorted(range(len(needles)), key=lambda i: needles[i].depth):
            place = round(needles[index].depth * free)
            spans += [
                RepeatedTokens(self._filler, start + before, place - before),
                whole(lines[index]),
            ]
            before = place
        return [*spans, RepeatedTokens(self._filler, start + before, free - before)]

    # Training

    def sample(self, batch_size: int, *, length: int, generator: torch.Generator) -> Batch:
        rng = random.Random(int(torch.randint(2**62, (), generator=generator)))
        prompts, chosen = [], []
        for _ in range(batch_size):
            needles = draw_needles(rng, rng.choice(self.n_keys))
            asked = rng.randrange(len(needles))
            start = rng.randrange(self.n_filler) if self.own_filler else 0
            prompts.append(self.prompt_of(needles, asked, length=length, start=start))
            chosen.append(needles[asked])
        is_document_start = torch.ones(batch_size, dtype=torch.bool)
        return self._batch(prompts, chosen, is_document_start, asked=[True] * batch_size)

    def segment(
        self, streams: Sequence[int], step: int, *, n_streams: int, length: int, seed: int
    ) -> Batch:
        """See `Task.segment`; a segment has `length` tokens, the question follows on a fork."""
        bodies, chosen, is_document_start, asked, repeat = [], [], [], [], []
        for stream in streams:
            document = self._document(stream, step, seed)
            index = step - document.start
            needle = document.needles[document.asked]
            bodies.append(torch.cat([self._body(document, index, length), self.question(needle)]))
            chosen.append(needle)
            is_document_start.append(index == 0)
            asked.append(document.asks(index))
            repeat.append(document.repeats[index])
        batch = self._batch(bodies, chosen, torch.tensor(is_document_start), asked, fork=length)
        return batch if set(repeat) == {1} else batch._replace(repeat=torch.tensor(repeat))

    def longest_document(self, length: int) -> int:
        return self.drawing.max_segments

    def data_sha256(self) -> str:
        return self._sha256

    def score(self, predictions: Tensor, batch: Batch) -> dict[str, Tensor]:
        """`accuracy`: whether the whole key is right. Rows that were not asked are left out."""
        asked = batch.answers().any(dim=1)
        return {"accuracy": exact_match(predictions, batch)[asked]}

    def _batch(
        self,
        prompts: list[Tensor],
        chosen: list[Needle],
        is_document_start: Tensor,
        asked: list[bool],
        *,
        fork: int | None = None,
    ) -> Batch:
        """Prompts followed by their answers; rows not asked have no target in the answer.

        What comes from token `fork` on is asked on a fork of the state.
        """
        answers = [self.answer(needle) for needle in chosen]
        width = max(len(p) + len(a) for p, a in zip(prompts, answers, strict=True))
        ids = torch.zeros(len(prompts), width, dtype=torch.long)
        targets = torch.full((len(prompts), width - 1), UNSCORED)
        answer_mask = torch.zeros(len(prompts), width - 1, dtype=torch.bool)
        for row, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
            start, stop = len(prompt), len(prompt) + len(answer)
            ids[row, :start] = prompt
            ids[row, start:stop] = answer
            last = stop if asked[row] else start
            targets[row, : last - 1] = ids[row, 1:last]
            answer_mask[row, start - 1 : stop - 1] = asked[row]
        if fork is not None:
            # What follows the segment is both the question and more filler: it is no target.
            targets[:, fork - 1] = UNSCORED
        scored = (targets != UNSCORED).float()
        weights = self.text_weight * scored / scored.sum(1, keepdim=True)
        per_answer = answer_mask.float() / answer_mask.sum(1, keepdim=True).clamp(min=1)
        weights = weights + self.answer_weight * per_answer
        query_length = 0 if fork is None else width - 1 - fork
        return Batch(ids[:, :-1], targets, is_document_start, weights, answer_mask, query_length)

    # Documents that go on

    def _document(self, stream: int, step: int, seed: int) -> Document:
        """The document that a stream is in at a step."""
        documents = self._streams.setdefault((seed, stream), [])
        while not documents or documents[-1].end <= step:
            start = documents[-1].end if documents else 0
            rng = random.Random(f"{seed}/{stream}/{len(documents)}")
            documents.append(self.drawing.document(start, rng))
        return next(d for d in reversed(documents) if d.start <= step)

    def _body(self, document: Document, index: int, length: int) -> Tensor:
        """The `length` tokens of segment `index`, as they stand in one long prompt."""
        head = self._header if index == 0 else self._header[:0]
        here = document.needles if index == document.key_segment else []
        earlier = len(self._header) if index > 0 else 0
        if index > document.key_segment:
            earlier += sum(len(self._line(needle)) for needle in document.needles)
        start = document.filler + index * length - earlier
        return torch.cat([head, read(self._hidden(here, start, length - len(head), length))])

    def _ids(self, text: str) -> Tensor:
        return torch.tensor(self.tokenizer.encode(text), dtype=torch.long)
