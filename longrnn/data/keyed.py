"""Rows of text, some of which hide keys that questions at their end ask for."""

import random
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor

from longrnn.data.batch import TASKS, Batch, Task
from longrnn.data.passkey import Keys, Passkey
from longrnn.data.stream import Part
from longrnn.data.text import Text
from longrnn.options import Count
from longrnn.text import Tokenizer


@TASKS.register("keyed_text")
class KeyedText(Text):
    """Predict the next token of a text; the last rows of every batch also recall keys.

    Such a row has the header of `Passkey`, the beginning of the text of its row with key lines in
    it, and a question about every key, in any order. Its loss is the mean over its tokens and the
    mean over those of the answers. Scores are those of these rows; held-out rows have no keys.

    Args:
        tokenizer: makes the ids of the text; bytes by default.
        data: as for `text`.
        part: likewise.
        keys: rows of each batch, of all processes together, with keys.
        n_keys: number of keys in a row; or a list to draw it from. Fewer where they do not fit.
        grow_steps: batches over which the distance from a key to the questions grows up to the
            whole row.
    """

    carries = False

    def __init__(
        self,
        tokenizer: Tokenizer | None = None,
        *,
        data: str | list[str],
        part: Part = "all",
        keys: Count = 1,
        n_keys: Keys | Annotated[list[Keys], Field(min_length=1)] = [1, 2, 4, 8],  # noqa: B006 (never changed)
        grow_steps: Count = 100,
    ) -> None:
        super().__init__(tokenizer, data=data, part=part)
        self.keys, self.grow_steps = 0 if part == "held_out" else keys, grow_steps
        self.passkey = Passkey(tokenizer, n_keys=n_keys)

    def batch(
        self, index: int, rows: range, *, of: int, length: int, seed: int, carried: bool
    ) -> Batch:
        """See `Task.batch`."""
        batch = super().batch(index, rows, of=of, length=length, seed=seed, carried=carried)
        if not self.keys:
            return batch
        weights, plain = batch.weights, max(0, min(len(rows), of - self.keys - rows.start))
        if weights is None:
            scored = batch.answers().float()
            weights = scored / scored.sum(1, keepdim=True)
        made = []
        for place in range(plain, len(rows)):
            text = batch.tokens[place]
            text = text if batch.is_token is None else text[batch.is_token[place]]
            text = text.repeat(-(-length // len(text)))[:length]  # the last row may be shorter
            rng = random.Random(f"{seed}/{index}/{rows[place]}")
            made.append(self.passkey.in_text(text, rng, min(1.0, (index + 1) / self.grow_steps)))
        batch = batch._replace(weights=weights, answer=torch.zeros_like(batch.is_document_start))
        if made:
            last = self.passkey.batch_of(made)
            for name in ("tokens", "targets", "is_document_start", "weights", "answer"):
                getattr(batch, name)[plain:] = getattr(last, name)
        if batch.is_token is not None:
            batch.is_token[plain:] = True
        return batch

    def score(self, predictions: Tensor, batch: Batch) -> dict[str, Tensor]:
        """See `Task.score`."""
        return Task.score(self, predictions, batch)
