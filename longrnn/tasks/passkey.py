"""Passkey retrieval: a five-digit key in a long filler, asked at the end (arXiv 2305.16300).

Notable choices:
- Prompts are put together from token ids, so that a prompt has exactly the length asked, with any
  tokenizer.
- Keys are split by a hash into those to train on and those to evaluate. A split by a digit would
  train a model that can never say that digit.
- A document that goes on over many segments asks its question at the end of some of them, on a
  fork of the state: the answer never enters what is carried, so the key must be remembered from
  its own line. It asks 0, 1, 2, 4, 8, … segments after that line: asked at every step of a long
  document, a key is learnt by the weights, and nothing is learnt about remembering.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from longrnn.errors import UserError
from longrnn.tasks.base import TASKS, UNSCORED, Batch, Task, exact_match
from longrnn.text import ByteTokenizer, Tokenizer, read_text

HEADER = "Something important is hidden in the text below. Remember it.\n"
FILLER = (
    "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again. "
)
KEY_LINE = "\nThe passkey is {key}. Remember it. {key} is the passkey.\n"
QUESTION = "\nWhat is the passkey? The passkey is"
ANSWER = " {key}"


def is_held_out(key: str) -> bool:
    """Whether a key is kept for evaluation: one in eight, by the first byte of its SHA-256."""
    return hashlib.sha256(key.encode()).digest()[0] % 8 == 0


@lru_cache(maxsize=2)
def keys(held_out: bool) -> tuple[str, ...]:
    """All keys of one side of the split, in order."""
    return tuple(k for k in (f"{i:05d}" for i in range(100_000)) if is_held_out(k) == held_out)


class Document(NamedTuple):
    """A passkey document over several segments; `start` is the step of its first one."""

    start: int
    segments: int
    key: str
    key_segment: int
    depth: float

    def asks(self, index: int) -> bool:
        """Whether the question follows the segment `index`."""
        since = index - self.key_segment
        return since >= 0 and since & (since - 1) == 0


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
        answer_weight: the loss is the mean over all tokens plus this times that over the answer.
        max_segments: longest document of `segment`; lengths are log-uniform.
        grow_steps: segments of a lane over which the longest document grows from 1 to
            `max_segments`.
        filler: a UTF-8 text file to take the filler from, over and over; None for `FILLER`.
    """

    default_length = 256

    def __init__(
        self,
        tokenizer: Tokenizer | None = None,
        *,
        answer_weight: float = 1.0,
        max_segments: int = 64,
        grow_steps: int = 0,
        filler: str | None = None,
    ) -> None:
        self.tokenizer = tokenizer or ByteTokenizer()
        self.vocab_size = self.tokenizer.vocab_size
        if max_segments < 1 or grow_steps < 0 or answer_weight < 0:
            raise UserError("passkey needs max_segments >= 1, grow_steps >= 0, answer_weight >= 0")
        self.answer_weight = answer_weight
        self.max_segments, self.grow_steps = max_segments, grow_steps
        self._header = self._ids(HEADER)
        self._filler = self._ids(FILLER if filler is None else read_text(Path(filler))[0])
        self._question = self._ids(QUESTION)
        self._lanes: dict[tuple[int, int], list[Document]] = {}

    # Prompts

    def prompt(self, key: str, *, length: int, depth: float) -> Tensor:
        """One prompt of exactly `length` tokens.

        Args:
            key: five digits.
            length: tokens, the question included and the answer not.
            depth: where the key line stands in the filler, from 0 (its start) to 1 (its end).

        Raises:
            UserError: a length too short to hold the key.
        """
        line = self._ids(KEY_LINE.format(key=key))
        room = length - len(self._header) - len(line) - len(self._question)
        if room < 0:
            raise UserError(
                f"a passkey prompt needs at least {length - room} tokens with this tokenizer, "
                f"not {length}"
            )
        before = round(depth * room)
        filler = self._filler_ids(0, room)
        return torch.cat([self._header, filler[:before], line, filler[before:], self._question])

    def parts(self, prompt: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Header, what it is about, and question of a prompt `(t,)`."""
        head, tail = len(self._header), len(prompt) - len(self._question)
        return prompt[:head], prompt[head:tail], prompt[tail:]

    def answer(self, key: str) -> Tensor:
        """The ids of the right answer, `(k,)`."""
        return self._ids(ANSWER.format(key=key))

    def least_length(self) -> int:
        """The shortest prompt that holds any key."""
        line = max(len(self._ids(KEY_LINE.format(key=key))) for key in keys(True)[::97])
        return len(self._header) + line + len(self._question)

    # Training

    def sample(self, batch_size: int, *, length: int, generator: torch.Generator) -> Batch:
        depths = torch.rand(batch_size, generator=generator).tolist()
        train = keys(False)
        picks = torch.randint(len(train), (batch_size,), generator=generator).tolist()
        chosen = [train[pick] for pick in picks]
        prompts = [
            self.prompt(key, length=length, depth=depth)
            for key, depth in zip(chosen, depths, strict=True)
        ]
        fresh = torch.ones(batch_size, dtype=torch.bool)
        return self._batch(prompts, chosen, fresh, asked=[True] * batch_size)

    def segment(
        self, lanes: Sequence[int], step: int, *, n_lanes: int, length: int, seed: int
    ) -> Batch:
        """See `Task.segment`; a segment has `length` tokens, the question follows on a fork."""
        bodies, chosen, fresh, asked = [], [], [], []
        for lane in lanes:
            document = self._document(lane, step, seed)
            index = step - document.start
            bodies.append(torch.cat([self._body(document, index, length), self._question]))
            chosen.append(document.key)
            fresh.append(index == 0)
            asked.append(document.asks(index))
        return self._batch(bodies, chosen, torch.tensor(fresh), asked, fork=length)

    def longest_document(self, length: int) -> int:
        return self.max_segments

    def score(self, predictions: Tensor, batch: Batch) -> dict[str, Tensor]:
        """`accuracy`: whether the whole key is right. Rows that were not asked are left out."""
        asked = batch.answers().any(dim=1)
        return {"accuracy": exact_match(predictions, batch)[asked]}

    def _batch(
        self,
        prompts: list[Tensor],
        chosen: list[str],
        fresh: Tensor,
        asked: list[bool],
        *,
        fork: int | None = None,
    ) -> Batch:
        """Prompts followed by their answers; rows not asked have no target in the answer.

        What comes from token `fork` on is asked on a fork of the state.
        """
        answers = [self.answer(key) for key in chosen]
        width = len(prompts[0]) + max(len(answer) for answer in answers)
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
        weights = scored / scored.sum(1, keepdim=True)
        per_answer = answer_mask.float() / answer_mask.sum(1, keepdim=True).clamp(min=1)
        weights = weights + self.answer_weight * per_answer
        tail = 0 if fork is None else width - 1 - fork
        return Batch(ids[:, :-1], targets, fresh, weights, answer_mask, tail)

    # Documents that go on

    def _document(self, lane: int, step: int, seed: int) -> Document:
        """The document that a lane is in at a step."""
        documents = self._lanes.setdefault((seed, lane), [])
        while not documents or documents[-1].start + documents[-1].segments <= step:
            start = documents[-1].start + documents[-1].segments if documents else 0
            documents.append(self._draw(start, random.Random(f"{seed}/{lane}/{len(documents)}")))
        return next(d for d in reversed(documents) if d.start <= step)

    def _draw(self, start: int, rng: random.Random) -> Document:
        grown = min(1.0, start / self.grow_steps) if self.grow_steps else 1.0
        segments = int((self.max_segments + 1) ** (grown * rng.random()))
        # Half of the documents begin with their key, so that the longest distances are seen too.
        key_segment = rng.choice([0, rng.randrange(segments)])
        return Document(start, segments, rng.choice(keys(False)), key_segment, rng.random())

    def _body(self, document: Document, index: int, length: int) -> Tensor:
        """The `length` tokens of segment `index`, as they stand in one long prompt."""
        line = self._ids(KEY_LINE.format(key=document.key))
        none = line[:0]
        head = self._header if index == 0 else none
        here = line if index == document.key_segment else none
        room = length - len(head) - len(here)
        if room < 0:
            raise UserError(
                f"a passkey segment needs at least {length - room} tokens, not {length}"
            )
        earlier = len(self._header) * (index > 0) + len(line) * (index > document.key_segment)
        before = round(document.depth * room)
        filler = self._filler_ids(index * length - earlier, room)
        return torch.cat([head, filler[:before], here, filler[before:]])

    def _filler_ids(self, start: int, count: int) -> Tensor:
        index = torch.arange(start, start + count) % len(self._filler)
        return self._filler[index]

    def _ids(self, text: str) -> Tensor:
        return torch.tensor(self.tokenizer.encode(text), dtype=torch.long)
