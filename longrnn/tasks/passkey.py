"""Passkey retrieval: recall one of the five-digit keys in a long filler (arXiv 2305.16300).

Notable choices:
- Prompts are put together from token ids, so that a prompt has exactly the requested length with
  any tokenizer.
- Keys are split by a hash into those to train on and those to evaluate. A split by a digit would
  train a model that can never generate that digit.
- Several keys in a text are numbered, with the number next to the digits: this measures memory, not
  reading.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from longrnn.errors import UserError
from longrnn.tasks.base import TASKS, UNSCORED, Batch, Task, row_starts
from longrnn.tasks.passkey_documents import (
    Document,
    Drawing,
    Needle,
    draw_needles,
    with_numbers,
)
from longrnn.tasks.passkey_prompts import FILLER, PasskeyPrompts
from longrnn.tasks.repeated import read
from longrnn.text import ByteTokenizer, Tokenizer, read_text


@TASKS.register("passkey")
class Passkey(PasskeyPrompts, Task):
    """Recall a key across filler.

    With a header `H…`, the filler `f…`, the key line `K…`, and the question `Q…`, one row is

        tokens   H H f f f K K f f f f f Q Q   4 2 7 1
        targets  H f f f K K f f f f f Q Q _ 4 2 7 1 9
        answer   . . . . . . . . . . . . . x x x x x x

    where the prompt (up to and including Q) has exactly `length` tokens, the targets are the next
    tokens, and `_` stands for the space before the key.

    Args:
        tokenizer: any; bytes by default.
        answer_weight: the loss is text_weight · (mean over the text) + answer_weight · (mean over
            the answer).
        text_weight: see answer_weight.
        n_keys: number of keys in a text; or a list to draw it from.
        n_queries: number of keys that training queries, one question with its answer after another
            and no key twice; a text with fewer keys queries all of them.
        min_segments: length of the shortest document of `segment`, in segments.
        max_segments: length of the longest one; lengths are log-uniform.
        max_repeat: largest number of repetitions of a segment of filler, log-uniform. Above 1 only
            for cells with a linear recurrence.
        grow_steps: segments of a stream over which the longest document grows from `min_segments`
            to `max_segments`, and repetitions from 1 to `max_repeat`.
        filler: UTF-8 text files for the filler, repeated from a random start; `FILLER` by default.
        numbers_every: inserts a random number between two words of the filler, one per this many
            characters on average; none by default.

    Attributes:
        n_filler: tokens of filler before it repeats.
    """

    default_length = 256

    def __init__(
        self,
        tokenizer: Tokenizer | None = None,
        *,
        answer_weight: float = 1.0,
        text_weight: float = 1.0,
        n_keys: int | list[int] = 1,
        n_queries: int = 1,
        min_segments: int = 1,
        max_segments: int = 64,
        max_repeat: int = 1,
        grow_steps: int = 0,
        filler: str | list[str] | None = None,
        numbers_every: int | None = None,
    ) -> None:
        tokenizer = tokenizer or ByteTokenizer()
        self.vocab_size = tokenizer.vocab_size
        for name, weight in (("answer_weight", answer_weight), ("text_weight", text_weight)):
            if not 0 <= weight < float("inf"):
                raise UserError(f"{name} must be at least 0 and finite, not {weight}: give 1.0")
        self.n_keys = [n_keys] if isinstance(n_keys, int) else n_keys
        if not self.n_keys or not all(1 <= count <= 9 for count in self.n_keys):
            raise UserError(
                f"n_keys must be from 1 to 9, not {n_keys}: set a number of keys, or a list of them"
            )
        if n_queries < 1:
            raise UserError(f"n_queries must be at least 1, not {n_queries}: set 1 or more")
        self.answer_weight, self.text_weight = answer_weight, text_weight
        files = [filler] if isinstance(filler, str) else filler
        text = FILLER if files is None else "".join(read_text(Path(file))[0] for file in files)
        if numbers_every is not None:
            text = with_numbers(text, numbers_every)
        super().__init__(tokenizer, text, max(self.n_keys))
        self.drawing = Drawing(
            min_segments,
            max_segments,
            max_repeat,
            grow_steps,
            self.n_keys,
            n_queries,
            self.n_filler,
        )
        self.drawing.check()
        self.own_filler = files is not None
        self._sha256 = hashlib.sha256(text.encode()).hexdigest() if files else ""
        self._streams: dict[tuple[int, int], list[Document]] = {}

    # Training

    def sample(self, batch_size: int, *, length: int, generator: torch.Generator) -> Batch:
        rng = random.Random(int(torch.randint(2**62, (), generator=generator)))
        prompts, chosen = [], []
        for _ in range(batch_size):
            needles = draw_needles(rng, rng.choice(self.n_keys))
            asked = self.drawing.queried(rng, len(needles))
            start = rng.randrange(self.n_filler) if self.own_filler else 0
            prompts.append(self.prompt_of(needles, asked[0], length=length, start=start))
            chosen.append([needles[index] for index in asked])
        begins = torch.ones(batch_size, dtype=torch.bool)
        return self._batch(prompts, chosen, begins, asked=[True] * batch_size)

    def segment(
        self, streams: Sequence[int], step: int, *, n_streams: int, length: int, seed: int
    ) -> Batch:
        """See `Task.segment`; a segment has `length` tokens; the question runs on a fork."""
        bodies, chosen, begins, asked, repeat = [], [], [], [], []
        for stream in streams:
            document = self._document(stream, step, seed)
            index = step - document.start
            needles = [document.needles[which] for which in document.asked]
            body = self._body(document, index, length)
            bodies.append(torch.cat([body, self.question(needles[0])]))
            chosen.append(needles)
            begins.append(index == 0)
            asked.append(document.asks(index))
            repeat.append(document.repeats[index])
        batch = self._batch(bodies, chosen, torch.tensor(begins), asked, fork=length)
        return batch if set(repeat) == {1} else batch._replace(repeat=torch.tensor(repeat))

    def longest_document(self, length: int) -> int:
        return self.drawing.max_segments

    def data_sha256(self) -> str:
        return self._sha256

    def score(self, predictions: Tensor, batch: Batch) -> dict[str, Tensor]:
        """`accuracy`: the share of whole keys that are right, in rows with a question."""
        answer = batch.answers()
        begins = answer & ~F.pad(answer, (1, 0))[:, :-1]
        # Places outside the answers belong to answer 0, which is left out.
        which = begins.cumsum(1) * answer
        n_answers = begins.sum(1)
        right = torch.ones(len(answer), int(n_answers.max()) + 1)
        right.scatter_reduce_(1, which, (predictions == batch.targets).float(), "amin")
        counted = torch.arange(1, right.shape[1]) <= n_answers[:, None]
        share = (right[:, 1:] * counted).sum(1) / n_answers
        return {"accuracy": share[n_answers > 0]}

    def _batch(
        self,
        prompts: list[Tensor],
        chosen: list[list[Needle]],
        begins: Tensor,
        asked: list[bool],
        *,
        fork: int | None = None,
    ) -> Batch:
        """Prompts followed by their answers; rows without a question have no target in the answer.

        A prompt ends with the question about the first of its chosen needles. Questions about the
        others and their answers follow. Tokens from index `fork` on run on a fork of the state.
        """
        rows = [self._queries(*row) for row in zip(prompts, chosen, strict=True)]
        width = max(len(ids) for ids, _ in rows)
        ids = torch.zeros(len(rows), width, dtype=torch.long)
        targets = torch.full((len(rows), width - 1), UNSCORED)
        answer_mask = torch.zeros(len(rows), width - 1, dtype=torch.bool)
        for row, (own, answers) in enumerate(rows):
            ids[row, : len(own)] = own
            last = len(own) if asked[row] else len(prompts[row])
            targets[row, : last - 1] = own[1:last]
            for start, stop in answers:
                answer_mask[row, start - 1 : stop - 1] = asked[row]
        if fork is not None:
            # The segment is followed by both the question and more filler: it has no target.
            targets[:, fork - 1] = UNSCORED
        scored = (targets != UNSCORED).float()
        weights = self.text_weight * scored / scored.sum(1, keepdim=True)
        per_answer = answer_mask.float() / answer_mask.sum(1, keepdim=True).clamp(min=1)
        weights = weights + self.answer_weight * per_answer
        query_length = 0 if fork is None else width - 1 - fork
        starts = row_starts(targets, begins)
        return Batch(ids[:, :-1], targets, starts, weights, answer_mask, query_length)

    def _queries(
        self, prompt: Tensor, needles: Sequence[Needle]
    ) -> tuple[Tensor, list[tuple[int, int]]]:
        """A prompt with all its queries, and the [start, stop) of each answer in it."""
        ids, answers = prompt, []
        for index, needle in enumerate(needles):
            if index:
                ids = torch.cat([ids, self.question(needle)])
            start = len(ids)
            ids = torch.cat([ids, self.answer(needle)])
            answers.append((start, len(ids)))
        return ids, answers

    # Documents that continue over segments

    def _document(self, stream: int, step: int, seed: int) -> Document:
        """The document that a stream reads at a step."""
        documents = self._streams.setdefault((seed, stream), [])
        while not documents or documents[-1].end <= step:
            start = documents[-1].end if documents else 0
            rng = random.Random(f"{seed}/{stream}/{len(documents)}")
            documents.append(self.drawing.document(start, rng))
        return next(d for d in reversed(documents) if d.start <= step)

    def _body(self, document: Document, index: int, length: int) -> Tensor:
        """The `length` tokens of segment `index`, as in one long prompt."""
        head = self._header if index == 0 else self._header[:0]
        here = document.needles if index == document.key_segment else []
        earlier = len(self._header) if index > 0 else 0
        if index > document.key_segment:
            earlier += sum(len(self._line(needle)) for needle in document.needles)
        start = document.filler + index * length - earlier
        return torch.cat([head, read(self._hidden(here, start, length - len(head), length))])
