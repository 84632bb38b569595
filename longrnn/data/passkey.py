"""Passkey retrieval: recall one of the five-digit keys in a long filler (arXiv 2305.16300).

Notable choices:
- Prompts are put together from token ids, so that a prompt has exactly the requested length with
  any tokenizer.
- Keys are split by a hash into those to train on and those to evaluate. A split by a digit would
  train a model that can never generate that digit.
- Several keys in a text are numbered, with the number next to the digits: this measures memory, not
  reading.
- In a document that continues over segments the question runs on a fork of the state, so the key
  must be remembered from its own line. It follows 0, 1, 2, 4, 8, … segments after that line: with a
  question at every step, the weights would memorize the key instead of the state.
- A segment that holds only filler may be repeated in closed form (see `longrnn.training.repeat`),
  so that few segments represent a long document.
"""

import hashlib
import os
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, NamedTuple

import torch
from pydantic import Field
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from longrnn.data.batch import TASKS, UNSCORED, Batch, Task, row_starts
from longrnn.data.prompts import FILLER, Needle, PasskeyPrompts, draw_needles
from longrnn.errors import UserError
from longrnn.files import read_text
from longrnn.options import Count, Share
from longrnn.seeds import mix, seeded
from longrnn.text import ByteTokenizer, Tokenizer

# Tokens, targets and answers of a row, `(t,)` each; see `Batch`.
PasskeyRow = tuple[Tensor, Tensor, Tensor]
Keys = Annotated[int, Field(ge=1, le=9)]


class PasskeyDocument(NamedTuple):
    """A document that continues over segments.

    Attributes:
        start: the index of its first batch.
        needles: its keys, all in one segment.
        asked: the needles that the questions name, in their order.
        key_segment: index of the segment that holds them.
        repeats: repetitions of each segment.
        filler: index in the filler at which the document begins.
    """

    start: int
    needles: list[Needle]
    asked: list[Needle]
    key_segment: int
    repeats: list[int]
    filler: int

    @property
    def end(self) -> int:
        """The index of the batch after its last segment."""
        return self.start + len(self.repeats)

    def asks(self, index: int) -> bool:
        """Whether the question follows the segment `index`."""
        since = index - self.key_segment
        return since >= 0 and since & (since - 1) == 0


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
        text: a text for the filler, in the place of files.
        text_weight: the loss is text_weight · (mean over the text) + (mean over the answer).
        n_keys: number of keys in a text; or a list to draw it from.
        n_queries: number of keys that training queries, one question with its answer after another
            and no key twice; a text with fewer keys queries all of them.
        min_segments: length of the shortest document of carried rows, in segments.
        max_segments: length of the longest one; lengths are log-uniform.
        max_repeat: largest number of repetitions of a segment of filler, log-uniform. Above 1 only
            for cells with a linear recurrence.
        grow_steps: batches over which the longest document grows from `min_segments` to
            `max_segments`, and repetitions from 1 to `max_repeat`.
        filler: UTF-8 text files for the filler, repeated from a random start; `FILLER` by default.
        numbers_every: inserts a random number between two words of the filler, one per this many
            characters on average; none by default.
    """

    carries = True

    def __init__(
        self,
        tokenizer: Tokenizer | None = None,
        text: str = "",
        *,
        text_weight: Share = 1.0,
        n_keys: Keys | Annotated[list[Keys], Field(min_length=1)] = 1,
        n_queries: Count = 1,
        min_segments: Count = 1,
        max_segments: Count = 64,
        max_repeat: Count = 1,
        grow_steps: Annotated[int, Field(ge=0, lt=2**31)] = 0,
        filler: str | list[str] | None = None,
        numbers_every: Count | None = None,
    ) -> None:
        if min_segments > max_segments:
            raise UserError(
                f"min_segments={min_segments} is above max_segments={max_segments}: set a larger "
                "max_segments"
            )
        tokenizer = tokenizer or ByteTokenizer()
        self.vocab_size = tokenizer.vocab_size
        self.n_keys = [n_keys] if isinstance(n_keys, int) else n_keys
        self.text_weight, self.n_queries = text_weight, n_queries
        self.grow_steps, self.max_repeat = grow_steps, max_repeat
        self.min_segments, self.max_segments = min_segments, max_segments
        files = [filler] if isinstance(filler, str) else filler or []
        text += "".join(read_text(Path(os.path.expanduser(file)))[0] for file in files)
        self.own_filler, text = bool(text), text or FILLER
        text = text if numbers_every is None else with_numbers(text, numbers_every)
        super().__init__(tokenizer, text, max(self.n_keys))
        self.data_sha256 = hashlib.sha256(text.encode()).hexdigest() if self.own_filler else ""
        self._streams: dict[tuple[int, int], list[PasskeyDocument]] = {}

    def batch(
        self, index: int, rows: range, *, of: int, length: int, seed: int, carried: bool
    ) -> Batch:
        """See `Task.batch`; a carried segment has `length` tokens, and the question is a fork."""
        if carried:
            return self._segments(index, rows, length, seed)
        drawn = torch.randint(2**62, (), generator=seeded(mix(seed, index, 0)))
        rng = random.Random(int(drawn))
        made = []
        for row in range(rows.stop):
            needles = draw_needles(rng, rng.choice(self.n_keys))
            asked = self._queried(rng, len(needles))
            start = rng.randrange(self.n_filler) if self.own_filler else 0
            if row >= rows.start:
                context = self.context(needles, asked[0], length=length, start=start)
                made.append(self._row(context, [needles[index] for index in asked]))
        return self.batch_of(made)

    def in_text(self, text: Tensor, rng: random.Random, reach: float) -> PasskeyRow:
        """A row of the length of a text: its beginning with keys, and a question about each.

        Args:
            text: `(t,)`, ids.
            rng: draws the number of keys, of which as many are taken as fit, and their places.
            reach: how much of the text before the questions may hold keys, from 0 to 1.

        Raises:
            LengthError: one key does not fit.
        """
        count = rng.choice(self.n_keys)
        while True:
            drawn = draw_needles(rng, count)
            needles = [needle._replace(depth=1 - reach * needle.depth) for needle in drawn]
            end = sum(len(self.question(needle)) + len(self.answer(needle)) for needle in needles)
            room = len(text) + 1 - self.n_header - end
            if count == 1 or sum(len(self.line(needle)) for needle in needles) <= room:
                hidden = self.hidden(needles, 0, room, len(text), text)
                return self._row(torch.cat([self._header, hidden]), rng.sample(needles, count))
            count -= 1

    def _queried(self, rng: random.Random, count: int) -> list[int]:
        """Indices of the keys that are queried in a text of `count` keys, in their order."""
        # `sample` would draw other numbers than those of the recorded runs.
        if self.n_queries == 1:
            return [rng.randrange(count)]
        return rng.sample(range(count), min(self.n_queries, count))

    def _row(self, text: Tensor, needles: Sequence[Needle], *, asked: bool = True) -> PasskeyRow:
        """A text with a question and an answer about each needle; these count if `asked`."""
        parts, scored, answer = [text], [True], [False]
        for index, needle in enumerate(needles):
            parts += [self.question(needle), self.answer(needle)]
            scored += [asked or index == 0, asked]
            answer += [False, asked]
        ids, sizes = torch.cat(parts), torch.tensor([len(part) for part in parts])
        has_target, is_answer = (
            torch.tensor(flags).repeat_interleave(sizes)[1:] for flags in (scored, answer)
        )
        return ids[:-1], ids[1:].where(has_target, UNSCORED), is_answer

    def batch_of(
        self, rows: Sequence[PasskeyRow], begins: Tensor | bool = True, fork: int | None = None
    ) -> Batch:
        """A batch of rows, whose tokens from index `fork` on run on a fork of the state."""
        tokens, targets, answer = (
            pad_sequence(list(column), batch_first=True, padding_value=value)
            for column, value in zip(zip(*rows, strict=True), (0, UNSCORED, False), strict=True)
        )
        query_length = 0
        if fork is not None:
            # The segment is followed by both the question and more filler: it has no target.
            targets[:, fork - 1] = UNSCORED
            query_length = tokens.shape[1] - fork
        scored = (targets != UNSCORED).float()
        weights = self.text_weight * scored / scored.sum(1, keepdim=True)
        weights = weights + answer.float() / answer.sum(1, keepdim=True).clamp(min=1)
        return Batch(tokens, targets, row_starts(tokens, begins), weights, answer, query_length)

    # Documents that continue over segments

    def _segments(self, index: int, rows: range, length: int, seed: int) -> Batch:
        made, begins, repeat = [], [], []
        for row in rows:
            document = self._document(row, index, seed)
            place = index - document.start
            body = self._body(document, place, length)
            made.append(self._row(body, document.asked, asked=document.asks(place)))
            begins.append(place == 0)
            repeat.append(document.repeats[place])
        batch = self.batch_of(made, torch.tensor(begins), fork=length)
        return batch if set(repeat) == {1} else batch._replace(repeat=torch.tensor(repeat))

    def _document(self, row: int, index: int, seed: int) -> PasskeyDocument:
        """The document that a row reads in a batch."""
        documents = self._streams.setdefault((seed, row), [])
        while not documents or documents[-1].end <= index:
            start = documents[-1].end if documents else 0
            documents.append(self._draw(start, random.Random(f"{seed}/{row}/{len(documents)}")))
        return next(d for d in reversed(documents) if d.start <= index)

    def _draw(self, start: int, rng: random.Random) -> PasskeyDocument:
        """The document that begins in batch `start`."""
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
        asked = [needles[index] for index in self._queried(rng, len(needles))]
        return PasskeyDocument(
            start, needles, asked, key_segment, repeats, rng.randrange(self.n_filler)
        )

    def _body(self, document: PasskeyDocument, index: int, length: int) -> Tensor:
        """The `length` tokens of segment `index`, as in one long prompt."""
        head = self._header if index == 0 else self._header[:0]
        here = document.needles if index == document.key_segment else []
        earlier = self.n_header if index > 0 else 0
        if index > document.key_segment:
            earlier += sum(len(self.line(needle)) for needle in document.needles)
        start = document.filler + index * length - earlier
        return torch.cat([head, self.hidden(here, start, length - len(head), length)])


def with_numbers(text: str, every: int) -> str:
    """A text with numbers of one to six digits between its words, the same ones every time.

    In most texts digits are rare. A model can then remember every digit to remember a key, which
    fails in a text with many other digits.

    Args:
        text: any text.
        every: characters of the text per number, on average.
    """
    rng = random.Random(every)
    words = text.split(" ")
    share = len(text) / len(words) / every
    return " ".join(
        f"{word} {rng.randrange(10 ** rng.randint(1, 6))}" if rng.random() < share else word
        for word in words
    )
