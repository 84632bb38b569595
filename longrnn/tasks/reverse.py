"""Reverse ordering of random tokens, with a vocabulary as large as one likes."""

from __future__ import annotations

import torch
from rapidfuzz.distance import DamerauLevenshtein
from torch import Tensor

from longrnn.errors import UserError
from longrnn.tasks.base import TASKS, UNSCORED, Batch, Task, exact_match
from longrnn.text import Tokenizer


@TASKS.register("reverse")
class Reverse(Task):
    """Say a sequence backwards (arXiv 2402.00236); not autoregressive.

    With V = 10 and length 3, `?` being the query token (id V) and `.` an unscored target:

        tokens   7 1 4 ? ? ?
        targets  . . . 4 1 7

    Args:
        tokenizer: ignored.
        vocab_size: V; the model has V + 1 ids, the last is the query token.
        held_out: sequences kept for evaluation; training rejects them.
        seed: of the held-out sequences.
    """

    default_length = 64

    def __init__(
        self,
        tokenizer: Tokenizer | None = None,
        *,
        vocab_size: int = 32,
        held_out: int = 1024,
        seed: int = 0,
    ) -> None:
        if vocab_size < 2 or held_out < 1:
            raise UserError("reverse needs vocab_size >= 2 and held_out >= 1")
        self.n_tokens, self.query = vocab_size, vocab_size
        self.vocab_size = vocab_size + 1
        self.n_held_out, self.seed = held_out, seed
        self._held_out: dict[int, tuple[Tensor, set[bytes]]] = {}

    def sample(self, batch_size: int, *, length: int, generator: torch.Generator) -> Batch:
        _, forbidden = self._evaluation_set(length)
        shape = (batch_size, length)
        x = torch.randint(self.n_tokens, shape, generator=generator)
        for values in x.numpy():  # views: what is written here is written to x
            while values.tobytes() in forbidden:
                values[:] = torch.randint(self.n_tokens, (length,), generator=generator).numpy()
        return self._batch(x)

    def evaluation_batch(self, start: int, stop: int, *, length: int) -> Batch:
        """Held-out sequences `start` up to `stop`."""
        return self._batch(self._evaluation_set(length)[0][start:stop])

    def score(self, predictions: Tensor, batch: Batch) -> dict[str, Tensor]:
        """`token_accuracy`, `exact_match` and `edit_distance` (Damerau–Levenshtein, in tokens)."""
        scored = batch.answers()
        right = (predictions == batch.targets) & scored
        distances = [
            DamerauLevenshtein.distance(said[mask].tolist(), wanted[mask].tolist())
            for said, wanted, mask in zip(predictions, batch.targets, scored, strict=True)
        ]
        return {
            "token_accuracy": right.sum(1) / scored.sum(1),
            "exact_match": exact_match(predictions, batch),
            "edit_distance": torch.tensor(distances, dtype=torch.float32),
        }

    def _batch(self, x: Tensor) -> Batch:
        return Batch(
            tokens=torch.cat([x, torch.full_like(x, self.query)], dim=1),
            targets=torch.cat([torch.full_like(x, UNSCORED), x.flip(1)], dim=1),
            fresh=torch.ones(len(x), dtype=torch.bool),
        )

    def _evaluation_set(self, length: int) -> tuple[Tensor, set[bytes]]:
        """The held-out sequences of one length, also as a set of their bytes."""
        if length < 1:
            raise UserError(f"length must be at least 1, not {length}")
        if self.n_tokens**length < 2 * self.n_held_out:
            raise UserError(
                f"{self.n_tokens} tokens make only {self.n_tokens**length} sequences of length "
                f"{length}: hold out at most half of them (held_out={self.n_held_out})"
            )
        if length not in self._held_out:
            generator = torch.Generator().manual_seed(self.seed)
            rows = torch.randint(self.n_tokens, (self.n_held_out, length), generator=generator)
            self._held_out[length] = rows, {row.tobytes() for row in rows.numpy()}
        return self._held_out[length]
