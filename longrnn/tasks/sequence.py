"""Base classes of the tasks of random sequences with one right answer.

What is evaluated is drawn once from a seed of its own, and training draws again where it hits one
of these sequences. Draws are independent: where there are few sequences one may be drawn twice, and
only so are mean scores unbiased, and their intervals those of independent samples, for every task
whose sequences are not equally likely.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import NamedTuple

import torch
from rapidfuzz.distance import DamerauLevenshtein
from torch import Tensor

from longrnn.errors import UserError
from longrnn.ranges import check_count
from longrnn.seeds import check_seed, seeded
from longrnn.tasks.base import UNSCORED, Batch, Task, exact_match, row_starts
from longrnn.text import Tokenizer


class Condition(NamedTuple):
    """Where the tokens of a test sequence are drawn from, uniformly.

    Attributes:
        name: of the condition; None where the task has only one.
        target: ids of the token that the test is about.
        disturbants: ids of all other tokens.
    """

    name: str | None
    target: range
    disturbants: range


class SequenceTask(Task):
    """Random sequences over V tokens, of which some are held out of training.

    Members write `batch`; where their sequences are not uniform, also `draw`, `count` and `check`.

    Args:
        tokenizer: ignored.
        vocab_size: V.
        held_out: sequences kept for evaluation; training rejects them.
        seed: of the held-out sequences.

    Attributes:
        n_tokens: V.
        query: the id of the query token, V; a task without one has V ids.
    """

    default_length = 64
    has_query = True

    def __init__(
        self,
        tokenizer: Tokenizer | None = None,
        *,
        vocab_size: int = 32,
        held_out: int = 1024,
        seed: int = 0,
    ) -> None:
        check_count("vocab_size", vocab_size, at_least=2)
        check_count("held_out", held_out)
        self.n_tokens, self.query = vocab_size, vocab_size
        self.vocab_size = vocab_size + self.has_query
        self.n_held_out, self.seed = held_out, check_seed(seed)
        self._held_out: dict[int, tuple[Tensor, set[bytes]]] = {}

    @abstractmethod
    def batch(self, x: Tensor) -> Batch:
        """Sequences as `draw` gives them, with their right answers."""

    def draw(self, n: int, length: int, generator: torch.Generator) -> Tensor:
        """`n` sequences as they are drawn in training, a row of int64 each."""
        return torch.randint(self.n_tokens, (n, length), generator=generator)

    def count(self, length: int) -> int:
        """How many sequences of a length there are for evaluation to choose from."""
        return self.n_tokens**length

    def check(self, length: int) -> None:
        """Refuses a length that the task does not have.

        Raises:
            UserError: such a length.
        """
        if length < 1:
            raise UserError(f"length must be at least 1, not {length}: use a positive number")

    def options(self) -> dict[str, int | float]:
        """What the held-out sequences depend on, beside their length."""
        return {"vocab_size": self.n_tokens, "seed": self.seed, "held_out": self.n_held_out}

    def conditions(self) -> list[Condition]:
        """The conditions of the test; held-out sequences take them in turn."""
        return [Condition(None, range(self.n_tokens), range(self.n_tokens))]

    def frequency_classes(self) -> dict[str, range]:
        """Ids of the `frequent` and of the `rare` tokens; empty if all are equally frequent."""
        return {}

    def condition(self, index: int) -> str | None:
        """Name of the condition of held-out sequence `index`; None where there is only one."""
        conditions = self.conditions()
        return conditions[index % len(conditions)].name

    def sample(self, batch_size: int, *, length: int, generator: torch.Generator) -> Batch:
        _, forbidden = self._evaluation_set(length)
        x = self.draw(batch_size, length, generator)
        for values in x.numpy():  # views: what is written here is written to x
            while values.tobytes() in forbidden:
                values[:] = self.draw(1, length, generator)[0].numpy()
        return self.batch(x)

    def evaluation_batch(self, start: int, stop: int, *, length: int) -> Batch:
        """Held-out sequences `start` up to `stop`."""
        return self.batch(self._evaluation_set(length)[0][start:stop])

    def width(self, length: int) -> int:
        """Tokens of a row, at a length that `sample` takes."""
        return self.evaluation_batch(0, 1, length=length).tokens.shape[1]

    def score(self, predictions: Tensor, batch: Batch) -> dict[str, Tensor]:
        """`token_accuracy`, `exact_match` and `edit_distance` (Damerau–Levenshtein, in tokens)."""
        scored = batch.answers()
        right = (predictions == batch.targets) & scored
        distances = [
            DamerauLevenshtein.distance(predicted[mask].tolist(), target[mask].tolist())
            for predicted, target, mask in zip(predictions, batch.targets, scored, strict=True)
        ]
        return {
            "token_accuracy": right.sum(1) / scored.sum(1),
            "exact_match": exact_match(predictions, batch),
            "edit_distance": torch.tensor(distances, dtype=torch.float32),
        }

    def _draw_held_out(self, length: int, generator: torch.Generator) -> Tensor:
        return self.draw(self.n_held_out, length, generator)

    def _evaluation_set(self, length: int) -> tuple[Tensor, set[bytes]]:
        """The held-out sequences of one length, also as a set of their bytes."""
        if length not in self._held_out:
            self.check(length)
            if self.count(length) < 2 * self.n_held_out:
                raise UserError(
                    f"with vocab_size={self.n_tokens} there are only {self.count(length)} "
                    f"sequences of length {length}: hold out at most half of them, not "
                    f"held_out={self.n_held_out}"
                )
            rows = self._draw_held_out(length, seeded(self.seed))
            self._held_out[length] = rows, {row.tobytes() for row in rows.numpy()}
        return self._held_out[length]


class Transduction(SequenceTask):
    """A sequence, then as many query tokens that predict the answer; not autoregressive."""

    @abstractmethod
    def answer(self, x: Tensor) -> Tensor:
        """The answer to `x` `(n, length)`, of the same shape."""

    def batch(self, x: Tensor) -> Batch:
        tokens = torch.cat([x, torch.full_like(x, self.query)], dim=1)
        targets = torch.cat([torch.full_like(x, UNSCORED), self.answer(x)], dim=1)
        return Batch(tokens, targets, row_starts(tokens))


def distinct(n: int, length: int, n_tokens: int, generator: torch.Generator) -> Tensor:
    """`(n, length)` int64: rows of distinct ids below `n_tokens`, every order equally likely."""
    return torch.rand(n, n_tokens, generator=generator).topk(length, dim=1).indices
