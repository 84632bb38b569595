"""Recall by load: sequences that state many pairs, and ask for what belongs to a key."""

from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor

from longrnn.data.batch import TASKS, UNSCORED
from longrnn.data.sequences import LONGEST_SEQUENCE, SequenceTask, Vocabulary, distinct
from longrnn.errors import UserError
from longrnn.options import Count, Seed
from longrnn.text import Tokenizer

# Tokens of a name, and of the number that follows.
NAME, NUMBER = 2, 4
# torch.multinomial draws from at most this many places.
MOST_PLACES = 2**24


@TASKS.register("mqar")
class MultiQueryRecall(SequenceTask):
    """Pairs of a key and a value, then each key once among random tokens: what is its value?

    As in zoology (arXiv 2312.04927): distinct keys from 1 to V/2 − 1, distinct values from V/2 on,
    and random tokens from the whole vocabulary, so that only the target tells a query from a random
    token. Queries are at even places; the distance of a query from the pairs follows a power law
    with the exponent `power` − 1. With two pairs:

    tokens   2 8 4 7 4 0 5 9 2 6
    targets  . . . . 7 . . . 8 .

    `length` counts all tokens; it is even and at least four times the number of pairs.

    Args:
        tokenizer: ignored.
        vocab_size: V.
        held_out: sequences kept for evaluation; training rejects them.
        seed: of the held-out sequences.
        n_pairs: number of pairs.
        power: 1 makes all distances equally likely.
    """

    has_query = False

    def __init__(
        self,
        tokenizer: Tokenizer | None = None,
        *,
        vocab_size: Vocabulary = 32,
        held_out: Count = 1024,
        seed: Seed = 0,
        n_pairs: Count = 4,
        power: Annotated[float, Field(gt=0, le=10)] = 0.01,
    ) -> None:
        super().__init__(tokenizer, vocab_size=vocab_size, held_out=held_out, seed=seed)
        if vocab_size < 2 * n_pairs + 2:
            raise UserError(
                f"vocab_size {vocab_size} has too few keys for {n_pairs} pairs: set at least "
                f"{2 * n_pairs + 2}, or a smaller n_pairs"
            )
        self.n_pairs, self.power = n_pairs, power

    @property
    def lengths(self) -> range:
        return range(4 * self.n_pairs, 2 * MOST_PLACES + 1, 2)

    def draw(self, n: int, length: int, generator: torch.Generator) -> Tensor:
        """Tokens, and 1 where a token is a query and 0 elsewhere, `(n, 2, length)`."""
        pairs, half = self.n_pairs, self.n_tokens // 2
        keys = 1 + distinct(n, pairs, half - 1, generator)
        values = half + distinct(n, pairs, self.n_tokens - half, generator)
        tokens = torch.randint(self.n_tokens, (n, length), generator=generator)
        tokens[:, : 2 * pairs] = torch.stack([keys, values], dim=2).flatten(1)
        weights = torch.arange(1.0, length // 2 - pairs + 1) ** (self.power - 1)
        gaps = torch.multinomial(weights.expand(n, -1), pairs, generator=generator)
        places = 2 * (pairs + gaps)
        is_query = torch.zeros_like(tokens).scatter(1, places, 1)
        return torch.stack([tokens.scatter(1, places, keys), is_query], dim=1)

    def rule(self, x: Tensor) -> tuple[Tensor, Tensor]:
        tokens, is_query = x.unbind(1)
        keys, values = tokens[:, : 2 * self.n_pairs].unflatten(1, (-1, 2)).unbind(2)
        # `(n, length)`: which pair has the token as its key; 0 where none has.
        pair = (tokens[:, :, None] == keys[:, None, :]).int().argmax(dim=2)
        return tokens, values.gather(1, pair).where(is_query == 1, UNSCORED)


@TASKS.register("phonebook")
class Phonebook(SequenceTask):
    """Lines of a name and its number, then a name once more: what is its number?

    A name has two tokens from the lower half of the vocabulary; names are distinct, but may share
    one of their tokens. A number has four tokens from the upper half. With two lines:

    tokens   2 4 7 8 5 6 1 4 9 6 6 8 1 4 ? ? ? ?
    targets  . . . . . . . . . . . . . . 9 6 6 8

    `length` counts the tokens of the lines and is a multiple of six. Looking up a line of a phone
    book in order to measure recall is from arXiv 2402.01032.
    """

    @property
    def lengths(self) -> range:
        line = NAME + NUMBER
        return range(line, min(LONGEST_SEQUENCE, (self.n_tokens // 2) ** NAME * line) + 1, line)

    def draw(self, n: int, length: int, generator: torch.Generator) -> Tensor:
        """The lines and the name that is asked for, `(n, length + 2)`."""
        lines, half = length // (NAME + NUMBER), self.n_tokens // 2
        codes = distinct(n, lines, half**NAME, generator)
        names = torch.stack([codes // half, codes % half], dim=2)
        numbers = torch.randint(half, self.n_tokens, (n, lines, NUMBER), generator=generator)
        asked = torch.randint(lines, (n,), generator=generator)
        book = torch.cat([names, numbers], dim=2).flatten(1)
        return torch.cat([book, names[torch.arange(n), asked]], dim=1)

    def rule(self, x: Tensor) -> tuple[Tensor, Tensor]:
        lines, asked = x[:, :-NAME].unflatten(1, (-1, NAME + NUMBER)), x[:, -NAME:]
        line = (lines[:, :, :NAME] == asked[:, None]).all(dim=2).int().argmax(dim=1)
        numbers = lines[torch.arange(len(x)), line, NAME:]
        return torch.cat([x, torch.full_like(numbers, self.query)], dim=1), numbers
