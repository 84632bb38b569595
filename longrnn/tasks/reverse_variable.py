"""Reverse ordering of sequences whose length differs from row to row."""

from __future__ import annotations

import torch
from torch import Tensor

from longrnn.errors import UserError
from longrnn.tasks.base import TASKS, UNSCORED, Batch, row_starts
from longrnn.tasks.sequence import SequenceTask
from longrnn.text import Tokenizer
from longrnn.units import TokenCount

# Beyond the end of a sequence in what `draw` gives.
NOTHING = -1


@TASKS.register("reverse_variable")
class ReverseVariable(SequenceTask):
    """Reverse a sequence of a length from `min_length` to `length` (arXiv 2402.00236).

    With V = 10, a row of length 3 where the longest has 4, `?` being the query token (id V) and `.`
    an unscored target:

        tokens   7 1 4 ? ? ? ? ?
        targets  . . . 4 1 7 . .

    What follows the answer is read after it and changes nothing. Lengths are uniform.

    Args:
        tokenizer: ignored.
        vocab_size: V.
        held_out: sequences, of all lengths together, kept for evaluation; training rejects them.
        seed: of the held-out sequences.
        min_length: of the shortest sequences.
    """

    def __init__(
        self,
        tokenizer: Tokenizer | None = None,
        *,
        vocab_size: int = 32,
        held_out: int = 1024,
        seed: int = 0,
        min_length: TokenCount = 32,
    ) -> None:
        super().__init__(tokenizer, vocab_size=vocab_size, held_out=held_out, seed=seed)
        if min_length < 1:
            raise UserError(
                f"min_length must be at least 1, not {min_length}: set a positive number"
            )
        self.min_length = min_length

    def check(self, length: int) -> None:
        if length < self.min_length:
            raise UserError(
                f"the longest sequence has {length} tokens and the shortest "
                f"min_length={self.min_length}: set a smaller min_length or take a larger length"
            )

    def count(self, length: int) -> int:
        return self.n_tokens**self.min_length

    def options(self) -> dict[str, int | float]:
        return super().options() | {"min_length": self.min_length}

    def draw(self, n: int, length: int, generator: torch.Generator) -> Tensor:
        """Sequences `(n, length)`, with −1 after the end of those that are shorter."""
        ends = torch.randint(self.min_length, length + 1, (n, 1), generator=generator)
        x = torch.randint(self.n_tokens, (n, length), generator=generator)
        return x.where(torch.arange(length) < ends, NOTHING)

    def batch(self, x: Tensor) -> Batch:
        n, width = x.shape
        ends = (x != NOTHING).sum(dim=1, keepdim=True)
        # At place p of 2 · width, the answer is the token at 2 · end − 1 − p of its row.
        mirrored = 2 * ends - 1 - torch.arange(2 * width)
        answer = x.gather(1, mirrored.clamp(0, width - 1))
        targets = answer.where((mirrored >= 0) & (mirrored < ends), UNSCORED)
        tokens = torch.full((n, 2 * width), self.query)
        tokens[:, :width] = x.where(x != NOTHING, self.query)
        return Batch(tokens, targets, row_starts(tokens))
