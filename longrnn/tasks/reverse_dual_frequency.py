"""Reverse ordering with frequent and rare tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from longrnn.errors import UserError
from longrnn.tasks.base import TASKS, Batch
from longrnn.tasks.sequence import Condition
from longrnn.tasks.transductions import Reverse
from longrnn.text import Tokenizer

# Whether the token asked for is rare, and whether the others, the disturbants, are.
CONDITIONS = [(False, False), (False, True), (True, False), (True, True)]


@TASKS.register("reverse_dual_frequency")
class ReverseDualFrequency(Reverse):
    """Reverse a sequence, half of whose vocabulary is rare (arXiv 2402.00236).

    In training a token is rare, one of the upper half of the vocabulary, with probability
    `rare_share`, and one of the lower half otherwise. In the test one token of a sequence is
    scored, the target; it is frequent or rare, and all others, the disturbants, are frequent or
    rare: four conditions. With V = 10 and length 3, `?` being the query token (id V) and `.` an
    unscored target, a test sequence of a rare target among frequent disturbants:

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
        vocab_size: int = 32,
        held_out: int = 1024,
        seed: int = 0,
        rare_share: float = 0.125,
    ) -> None:
        super().__init__(tokenizer, vocab_size=vocab_size, held_out=held_out, seed=seed)
        if vocab_size % 2 or not 0 < rare_share < 1:
            raise UserError(
                "reverse_dual_frequency needs an even vocab_size and a rare_share between 0 and 1, "
                f"not {vocab_size} and {rare_share}: set such values"
            )
        self.half, self.rare_share = vocab_size // 2, rare_share

    def count(self, length: int) -> int:
        return self.half**length  # of the narrowest condition

    def options(self) -> dict[str, int | float]:
        return super().options() | {"rare_share": self.rare_share}

    def frequency_classes(self) -> dict[str, range]:
        return {"frequent": range(self.half), "rare": range(self.half, self.n_tokens)}

    def conditions(self) -> list[Condition]:
        classes = self.frequency_classes()
        return [
            Condition(f"{target} target, {others} disturbants", classes[target], classes[others])
            for target in classes
            for others in classes
        ]

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
        target, others = torch.tensor(CONDITIONS)[index % 4].unbind(1)
        is_target = torch.arange(length) == self._place(index, length)[:, None]
        rare = torch.where(is_target, target[:, None], others[:, None])
        x = torch.randint(self.half, (self.n_held_out, length), generator=generator)
        return x + self.half * rare

    @staticmethod
    def _place(index: Tensor, length: int) -> Tensor:
        """Where in its sequence the target of held-out sequence `index` stands."""
        return index // 4 % length
