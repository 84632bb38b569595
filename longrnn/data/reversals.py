"""Reversals of unequal sequences: of several lengths, or with rare tokens (arXiv 2402.00236)."""

from __future__ import annotations

from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor

from longrnn.data.batch import TASKS, UNSCORED, Batch
from longrnn.data.sequences import LONGEST, Reverse, SequenceTask, Vocabulary
from longrnn.options import Count, Seed, Tokens
from longrnn.text import Tokenizer

# Beyond the end of a sequence in what `ReverseVariable.draw` gives.
NOTHING = -1


@TASKS.register("reverse_variable")
class ReverseVariable(SequenceTask):
    """Reverse a sequence of a length from `min_length` to `length`; lengths are uniform.

    A row of length 3 where the longest has 4:

    tokens   7 1 4 ? ? ? ? ?
    targets  . . . 4 1 7 . .

    What follows the answer is read after it and changes nothing.

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
        vocab_size: Vocabulary = 32,
        held_out: Count = 1024,
        seed: Seed = 0,
        min_length: Tokens = 32,
    ) -> None:
        super().__init__(tokenizer, vocab_size=vocab_size, held_out=held_out, seed=seed)
        self.min_length = min_length

    @property
    def lengths(self) -> range:
        return range(self.min_length, LONGEST + 1)

    def draw(self, n: int, length: int, generator: torch.Generator) -> Tensor:
        """Sequences `(n, length)`, with −1 after the end of those that are shorter."""
        ends = torch.randint(self.min_length, length + 1, (n, 1), generator=generator)
        x = torch.randint(self.n_tokens, (n, length), generator=generator)
        return x.where(torch.arange(length) < ends, NOTHING)

    def rule(self, x: Tensor) -> tuple[Tensor, Tensor]:
        n, width = x.shape
        ends = (x != NOTHING).sum(dim=1, keepdim=True)
        # At place p of 2 · width, the answer is the token at 2 · end − 1 − p of its row.
        mirrored = 2 * ends - 1 - torch.arange(2 * width)
        answer = x.gather(1, mirrored.clamp(0, width - 1))
        targets = answer.where((mirrored >= 0) & (mirrored < ends), UNSCORED)
        tokens = torch.full((n, 2 * width), self.query)
        tokens[:, :width] = x.where(x != NOTHING, self.query)
        return tokens, targets


@TASKS.register("reverse_dual_frequency")
class ReverseDualFrequency(Reverse):
    """Reverse a sequence, half of whose vocabulary is rare.

    In training a token is rare, one of the upper half of the vocabulary, with probability
    `rare_share`, and one of the lower half otherwise. In the test one token of a sequence is
    scored, the target; it is frequent or rare, and all others, the disturbants, are frequent or
    rare: four conditions. A test sequence of a rare target among frequent disturbants:

    tokens   2 9 4 ? ? ?
    targets  . . . 4 9 2
    answer   . . . . x .

    Args:
        tokenizer: ignored.
        vocab_size: V, even.
        held_out: test sequences, which training rejects; conditions and places of the target take
            turns.
        seed: of the held-out sequences.
        rare_share: probability of a rare token in training.
    """

    def __init__(
        self,
        tokenizer: Tokenizer | None = None,
        *,
        vocab_size: Annotated[int, Field(ge=2, multiple_of=2)] = 32,
        held_out: Count = 1024,
        seed: Seed = 0,
        rare_share: Annotated[float, Field(gt=0, lt=1)] = 0.125,
    ) -> None:
        super().__init__(tokenizer, vocab_size=vocab_size, held_out=held_out, seed=seed)
        self.half, self.rare_share = vocab_size // 2, rare_share

    def frequency_classes(self) -> dict[str, range]:
        """Ids of the `frequent` and of the `rare` tokens."""
        return {"frequent": range(self.half), "rare": range(self.half, self.n_tokens)}

    def conditions(self) -> dict[str, tuple[range, range]]:
        """The conditions of the test: ids of the target and of the disturbants, by name."""
        classes = self.frequency_classes()
        return {
            f"{target} target, {others} disturbants": (classes[target], classes[others])
            for target in classes
            for others in classes
        }

    def condition(self, index: int) -> str | None:
        return [*self.conditions()][index % 4]

    def draw(self, n: int, length: int, generator: torch.Generator) -> Tensor:
        x = torch.randint(self.half, (n, length), generator=generator)
        return x + self.half * (torch.rand(n, length, generator=generator) < self.rare_share)

    def evaluation_batch(self, start: int, stop: int, *, length: int) -> Batch:
        batch = super().evaluation_batch(start, stop, length=length)
        place = length + length - 1 - self._place(torch.arange(start, stop), length)
        answer = torch.arange(2 * length) == place[: len(batch.tokens), None]
        return batch._replace(answer=answer)

    def _draw_held_out(self, length: int, generator: torch.Generator) -> Tensor:
        index = torch.arange(self.n_held_out)
        is_target = torch.arange(length) == self._place(index, length)[:, None]
        rare = torch.where(is_target, index[:, None] % 4 >= 2, index[:, None] % 2 == 1)
        x = torch.randint(self.half, (self.n_held_out, length), generator=generator)
        return x + self.half * rare

    @staticmethod
    def _place(index: Tensor, length: int) -> Tensor:
        """Where in its sequence the target of held-out sequence `index` stands."""
        return index // 4 % length
