"""Random sequences with one right answer (arXiv 2402.00236; 2312.04927 for `recall`).

A task is one function `rule`, from sequences to input tokens and targets; the drawings use V = 10,
`?` for the query token (id V) and `.` for an unscored target. None is autoregressive: query tokens
are the inputs where the answer is predicted.

What is evaluated is drawn once from a seed of its own, and training draws again where it hits one
of these sequences, which may be half of its draws at most. Draws are independent: only so are mean
scores unbiased, and their intervals those of independent samples, for every task whose sequences
are not equally likely.
"""

from abc import abstractmethod
from functools import cache
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor
from torch.nn import functional as F

from longrnn.data.batch import TASKS, UNSCORED, Batch, Task, row_starts
from longrnn.errors import LengthError
from longrnn.options import Count, Seed
from longrnn.seeds import mix, seeded
from longrnn.text import Tokenizer

Vocabulary = Annotated[int, Field(ge=2, lt=2**31)]
# Draws that tell which share of the sequences is held out.
SHARE_SAMPLES = 1024
# Random numbers that are held at once.
NUMBERS_AT_ONCE = 2**24
# The length of a sequence without a limit of its own.
LONGEST_SEQUENCE = 10**9


class SequenceTask(Task):
    """Random sequences over V tokens, of which some are held out of training.

    Members write `rule`; where their sequences are not uniform, also `draw` and `lengths`.

    Args:
        tokenizer: ignored.
        vocab_size: V.
        held_out: sequences kept for evaluation; training rejects them.
        seed: of the held-out sequences.

    Attributes:
        n_tokens: V.
        query: the id of the query token, V; a task without queries has V ids.
    """

    has_query = True

    def __init__(
        self,
        tokenizer: Tokenizer | None = None,
        *,
        vocab_size: Vocabulary = 32,
        held_out: Count = 1024,
        seed: Seed = 0,
    ) -> None:
        self.n_tokens = self.query = vocab_size
        self.vocab_size = vocab_size + self.has_query
        self.n_held_out, self.seed = held_out, seed
        self._evaluation_set = cache(self._draw_evaluation_set)
        self._forbidden = cache(self._find_forbidden)

    @abstractmethod
    def rule(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Input tokens of sequences `x` as `draw` gives them, and targets, those of the last ones.

        Tokens in front of those with a target are not scored.
        """

    def draw(self, n: int, length: int, generator: torch.Generator) -> Tensor:
        """`n` sequences as they are drawn in training, a row of int64 each."""
        return torch.randint(self.n_tokens, (n, length), generator=generator)

    @property
    def lengths(self) -> range:
        """The lengths that the task has."""
        return range(1, LONGEST_SEQUENCE + 1)

    def condition(self, index: int) -> str | None:
        """Name of the condition of held-out sequence `index`; None where there is only one."""
        return None

    def batch(
        self, index: int, rows: range, *, of: int, length: int, seed: int, carried: bool
    ) -> Batch:
        forbidden = self._forbidden(length)
        generator = seeded(mix(seed, index, 0))
        x = self.draw(of, length, generator)
        while (again := _are_in(x, forbidden)).any():
            x[again] = self.draw(int(again.sum()), length, generator)
        return self._batch(x[rows.start : rows.stop])

    def _find_forbidden(self, length: int) -> set[bytes]:
        """The held-out sequences; refused if training would reject more than half of its draws."""
        _, forbidden = self._evaluation_set(length)
        x = self.draw(SHARE_SAMPLES, length, seeded(mix(self.seed, "share")))
        share = float(_are_in(x, forbidden).double().mean())
        if share > 0.5:
            raise LengthError(
                f"{share:.0%} of the sequences of length {length} over {self.n_tokens} tokens "
                f"are held out: set held_out below {self.n_held_out}, or give greater lengths"
            )
        return forbidden

    def held_out(self, count: int, *, length: int) -> Batch:
        return self.evaluation_batch(0, count, length=length)

    def evaluation_batch(self, start: int, stop: int, *, length: int) -> Batch:
        """Held-out sequences `start` up to `stop`."""
        return self._batch(self._evaluation_set(length)[0][start:stop])

    def _batch(self, x: Tensor) -> Batch:
        tokens, targets = self.rule(x)
        before = tokens.shape[1] - targets.shape[1]
        return Batch(tokens, F.pad(targets, (before, 0), value=UNSCORED), row_starts(tokens))

    def _draw_held_out(self, length: int, generator: torch.Generator) -> Tensor:
        return self.draw(self.n_held_out, length, generator)

    def _draw_evaluation_set(self, length: int) -> tuple[Tensor, set[bytes]]:
        """The held-out sequences of one length, also as a set of their bytes."""
        if length not in self.lengths:
            raise LengthError(
                f"{type(self).__name__} with vocab_size={self.n_tokens} has lengths from "
                f"{self.lengths[0]} to {self.lengths[-1]:,} in steps of {self.lengths.step}, "
                f"not {length}: take one of these, or set vocab_size"
            )
        rows = self._draw_held_out(length, seeded(self.seed))
        return rows, {row.tobytes() for row in rows.numpy()}


class Transduction(SequenceTask):
    """A sequence, then as many query tokens that predict the answer."""

    @abstractmethod
    def answer(self, x: Tensor) -> Tensor:
        """The answer to `x` `(n, length)`, of the same shape."""

    def rule(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return torch.cat([x, torch.full_like(x, self.query)], 1), self.answer(x)


@TASKS.register("copy")
class Copy(Transduction):
    """Repeat a sequence.

    tokens   7 1 4 ? ? ?
    targets  . . . 7 1 4
    """

    def answer(self, x: Tensor) -> Tensor:
        return x


@TASKS.register("reverse")
class Reverse(Transduction):
    """Repeat a sequence in reverse order.

    tokens   7 1 4 ? ? ?
    targets  . . . 4 1 7
    """

    def answer(self, x: Tensor) -> Tensor:
        return x.flip(1)


@TASKS.register("sort")
class Sort(Transduction):
    """Repeat the tokens of a sequence in the order of their ids.

    tokens   7 1 4 1 ? ? ? ?
    targets  . . . . 1 1 4 7
    """

    def answer(self, x: Tensor) -> Tensor:
        return x.sort(dim=1).values


@TASKS.register("delayed_sum")
class DelayedSum(SequenceTask):
    """At each token of the second half, its sum with the mirrored token of the first, modulo V.

    tokens   7 1 4 2 5 8
    targets  . . . 6 6 5

    `length` counts both halves and is even.
    """

    has_query = False

    @property
    def lengths(self) -> range:
        return range(2, LONGEST_SEQUENCE + 1, 2)

    def rule(self, x: Tensor) -> tuple[Tensor, Tensor]:
        first, second = x.chunk(2, dim=1)
        return x, (first.flip(1) + second) % self.n_tokens


@TASKS.register("predecessor_query")
class PredecessorQuery(SequenceTask):
    """Distinct tokens, then one of them again: which came right before it?

    tokens   7 1 4 8 4
    targets  . . . . 1

    `length` counts the distinct tokens; the last input asks about one that has a predecessor.
    """

    has_query = False

    @property
    def lengths(self) -> range:
        return range(2, self.n_tokens + 1)

    def draw(self, n: int, length: int, generator: torch.Generator) -> Tensor:
        """The distinct tokens and, as the last of `(n, length + 1)`, the one asked about."""
        x = distinct(n, length, self.n_tokens, generator)
        place = torch.randint(1, length, (n, 1), generator=generator)
        return torch.cat([x, x.gather(1, place)], dim=1)

    def rule(self, x: Tensor) -> tuple[Tensor, Tensor]:
        place = (x[:, :-1] == x[:, -1:]).int().argmax(dim=1, keepdim=True)
        return x, x.gather(1, place - 1)


@TASKS.register("recall")
class Recall(SequenceTask):
    """Pairs of a key and a value, then every key once more: what is its value?

    Keys are distinct and come from the lower half of the vocabulary, values from the upper:

    tokens   2 9 0 7 1 9 1 2 0
    targets  . . . . . . 9 9 7

    `length` counts the tokens of the pairs and is even; the keys are asked in a random order.
    """

    has_query = False

    @property
    def lengths(self) -> range:
        return range(2, self.n_tokens // 2 * 2 + 1, 2)

    def draw(self, n: int, length: int, generator: torch.Generator) -> Tensor:
        """Pairs, then the keys in the order in which they are asked, `(n, 3 · length / 2)`."""
        pairs, lower = length // 2, self.n_tokens // 2
        keys = distinct(n, pairs, lower, generator)
        values = torch.randint(lower, self.n_tokens, (n, pairs), generator=generator)
        asked = keys.gather(1, distinct(n, pairs, pairs, generator))
        return torch.cat([torch.stack([keys, values], dim=2).flatten(1), asked], dim=1)

    def rule(self, x: Tensor) -> tuple[Tensor, Tensor]:
        length = x.shape[1] // 3 * 2
        keys, values, asked = x[:, :length:2], x[:, 1:length:2], x[:, length:]
        place = (asked[:, :, None] == keys[:, None, :]).int().argmax(dim=2)
        return x, values.gather(1, place)


def _are_in(x: Tensor, forbidden: set[bytes]) -> Tensor:
    """`(n,)` bool: which of the rows of `x` `(n, …)` are forbidden."""
    return torch.tensor([row.tobytes() in forbidden for row in x.numpy()])


def distinct(n: int, length: int, n_tokens: int, generator: torch.Generator) -> Tensor:
    """`(n, length)` int64: rows of distinct ids below `n_tokens`, every order equally likely."""
    at_once = max(1, NUMBERS_AT_ONCE // n_tokens)
    return torch.cat(
        [
            torch.rand(min(at_once, n - first), n_tokens, generator=generator).topk(length).indices
            for first in range(0, n, at_once)
        ]
    )
