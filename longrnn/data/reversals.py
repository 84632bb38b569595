"""Reversals of unequal sequences: of several lengths, or with rare tokens (arXiv 2402.00236)."""

import torch
from torch import Tensor

from longrnn.data.batch import TASKS, UNSCORED, Batch
from longrnn.data.sequences import Reverse, SequenceTask

# Beyond the end of a sequence in what `ReverseVariable.draw` gives.
NOTHING = -1
# The probability of a rare token in training.
RARE_SHARE = 1 / 8


@TASKS.register("reverse_variable")
class ReverseVariable(SequenceTask):
    """Reverse a sequence of a length from half of `length` to `length`; lengths are uniform.

    A row of length 3 where the longest has 4:

    tokens   7 1 4 ? ? ? ? ?
    targets  . . . 4 1 7 . .

    What follows the answer is read after it and changes nothing.

    Args:
        tokenizer: ignored.
        vocab_size: V.
        held_out: sequences, of all lengths together, kept for evaluation; training rejects them.
        seed: of the held-out sequences.
    """

    def draw(self, n: int, length: int, generator: torch.Generator) -> Tensor:
        """Sequences `(n, length)`, with −1 after the end of those that are shorter."""
        ends = torch.randint(max(1, length // 2), length + 1, (n, 1), generator=generator)
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

    In training a token is rare, one of the upper half of the vocabulary, with probability 1/8, and
    one of the lower half otherwise. In the test one token of a sequence is
    scored, the target; it is frequent or rare, and all others, the disturbants, are frequent or
    rare: four conditions. A test sequence of a rare target among frequent disturbants:

    tokens   2 9 4 ? ? ?
    targets  . . . 4 9 2
    answer   . . . . x .

    Args:
        tokenizer: ignored.
        vocab_size: V; the last id of an odd one is not used.
        held_out: test sequences, which training rejects; conditions and places of the target take
            turns.
        seed: of the held-out sequences.
    """

    @property
    def half(self) -> int:
        """The number of frequent tokens, and that of rare ones."""
        return self.n_tokens // 2

    def conditions(self) -> dict[str, tuple[range, range]]:
        """The conditions of the test: ids of the target and of the disturbants, by name."""
        classes = {"frequent": range(self.half), "rare": range(self.half, 2 * self.half)}
        return {
            f"{target} target, {others} disturbants": (classes[target], classes[others])
            for target in classes
            for others in classes
        }

    def condition(self, index: int) -> str | None:
        return [*self.conditions()][index % 4]

    def draw(self, n: int, length: int, generator: torch.Generator) -> Tensor:
        x = torch.randint(self.half, (n, length), generator=generator)
        return x + self.half * (torch.rand(n, length, generator=generator) < RARE_SHARE)

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
        """The position of the target in held-out sequence `index`."""
        return index // 4 % length
