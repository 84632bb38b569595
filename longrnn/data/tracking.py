"""State tracking: after every token, the state of an automaton that reads the sequence.

Every input is also a scored place, as in the word problems of arXiv 2404.08819: the target is the
product of all tokens so far in a group, which is cyclic in `parity` and `modular_sum`.
"""

from itertools import combinations
from itertools import permutations as orders
from typing import Literal

import torch
from torch import Tensor

from longrnn.data.batch import TASKS
from longrnn.data.sequences import SequenceTask
from longrnn.options import Count, Seed
from longrnn.text import Tokenizer


@TASKS.register("modular_sum")
class ModularSum(SequenceTask):
    """The sum of all tokens so far, modulo V: modular arithmetic without brackets.

    tokens   7 1 4 2 5
    targets  7 8 2 4 9
    """

    has_query = False

    def rule(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x, x.cumsum(1) % self.n_tokens


@TASKS.register("parity")
class Parity(ModularSum):
    """Whether the number of ones so far is odd.

    tokens   1 0 1 1 0
    targets  1 1 0 1 1

    Args:
        tokenizer: ignored.
        vocab_size: 2.
        held_out: sequences kept for evaluation; training rejects them.
        seed: of the held-out sequences.
    """

    def __init__(
        self,
        tokenizer: Tokenizer | None = None,
        *,
        vocab_size: Literal[2] = 2,
        held_out: Count = 1024,
        seed: Seed = 0,
    ) -> None:
        super().__init__(tokenizer, vocab_size=vocab_size, held_out=held_out, seed=seed)


@TASKS.register("permutations")
class Permutations(SequenceTask):
    """The product of all permutations so far, of which the last one is applied last.

    A token is a permutation in the group S3, A5 or S5; in lexicographic order, from the identity.
    With S3, whose elements are 012 021 102 120 201 210:

    tokens   1 2 4 4 1
    targets  1 3 0 4 2

    Args:
        tokenizer: ignored.
        vocab_size: number of permutations: 6 for S3, 60 for A5, 120 for S5.
        held_out: sequences kept for evaluation; training rejects them.
        seed: of the held-out sequences.
    """

    has_query = False

    def __init__(
        self,
        tokenizer: Tokenizer | None = None,
        *,
        vocab_size: Literal[6, 60, 120] = 60,
        held_out: Count = 1024,
        seed: Seed = 0,
    ) -> None:
        super().__init__(tokenizer, vocab_size=vocab_size, held_out=held_out, seed=seed)
        size, only_even = {6: (3, False), 60: (5, True), 120: (5, False)}[vocab_size]
        elements = [p for p in orders(range(size)) if not only_even or _is_even(p)]
        number = {permutation: index for index, permutation in enumerate(elements)}
        # `(V, V)`: the permutation of the row after that of the column.
        self.products = torch.tensor(
            [[number[tuple(after[k] for k in first)] for first in elements] for after in elements]
        )

    def rule(self, x: Tensor) -> tuple[Tensor, Tensor]:
        states = [x[:, 0]]
        for token in x[:, 1:].unbind(1):
            states.append(self.products[token, states[-1]])
        return x, torch.stack(states, dim=1)


def _is_even(permutation: tuple[int, ...]) -> bool:
    """Whether a permutation has an even number of inversions."""
    return sum(a > b for a, b in combinations(permutation, 2)) % 2 == 0
