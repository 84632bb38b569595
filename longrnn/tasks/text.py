"""Language modelling: the next token of a text."""

from __future__ import annotations

from itertools import accumulate
from pathlib import Path

import torch
from torch import Tensor

from longrnn.errors import UserError
from longrnn.tasks.base import TASKS, Batch, Task
from longrnn.text import ByteTokenizer, Tokenizer, read_text


@TASKS.register("text")
class Text(Task):
    """Say the next token of a text, everywhere.

    With the text `to be` and length 4, one byte a token:

        tokens   t o   b
        targets  o   b e

    Rows start at places drawn uniformly from all files; none runs over the end of a file. What is
    held out is what is in other files.

    Args:
        tokenizer: ids of the text; bytes where it is None.
        files: UTF-8 text files to train on.
    """

    default_length = 256

    def __init__(self, tokenizer: Tokenizer | None = None, *, files: list[str]) -> None:
        if not files:
            raise UserError("the text task needs files: a list of UTF-8 text files to train on")
        tokenizer = tokenizer or ByteTokenizer()
        self.vocab_size = tokenizer.vocab_size
        self.texts = [
            torch.tensor(tokenizer.encode(read_text(Path(file))[0]), dtype=torch.int32)
            for file in files
        ]

    def sample(self, batch_size: int, *, length: int, generator: torch.Generator) -> Batch:
        starts = [max(0, len(text) - length) for text in self.texts]
        ends = list(accumulate(starts))
        if ends[-1] == 0:
            longest = max(len(text) for text in self.texts) - 1
            raise UserError(
                f"no text has more than {length} tokens, the longest has {longest + 1}: use a "
                f"length of at most {longest}"
            )
        drawn = torch.randint(ends[-1], (batch_size,), generator=generator).tolist()
        rows = torch.stack([self._row(place, ends, starts, length) for place in drawn])
        return Batch(rows[:, :-1], rows[:, 1:], torch.ones(batch_size, dtype=torch.bool))

    def _row(self, place: int, ends: list[int], starts: list[int], length: int) -> Tensor:
        """`length` + 1 tokens of one text; `place` counts through the starts of all texts."""
        index = next(i for i, end in enumerate(ends) if place < end)
        start = place - (ends[index] - starts[index])
        return self.texts[index][start : start + length + 1].long()

    def score(self, predictions: Tensor, batch: Batch) -> dict[str, Tensor]:
        """`accuracy`: the share of tokens that are right."""
        return {"accuracy": (predictions == batch.targets).float().mean(dim=1)}
