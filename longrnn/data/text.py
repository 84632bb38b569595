"""Language modelling: the next token of a text, or of the answers to prompts."""

from bisect import bisect_right
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from longrnn.data.batch import TASKS, UNSCORED, Batch, Task
from longrnn.data.build import corpus_of
from longrnn.data.stream import Part, Whole, shuffled
from longrnn.text import ByteTokenizer, Tokenizer
from longrnn.units import counted


@TASKS.register("text")
class Text(Task):
    """Predict the next token of a text at every token.

    With the text `to be` and length 4, one byte per token:

        tokens   t o   b
        targets  o   b e

    Documents of any length follow each other in a row, each from the zero state. The last token of
    a document is predicted and predicts nothing. Every token is read once per epoch and has the
    same weight, also in the last row, which may be shorter: the loss of a row is the sum over its
    tokens, divided by their mean number per row of the data. A carried row i of n reads the places
    from i·T/n up to (i+1)·T/n of every epoch, segment after segment; T is the number of all places.

    Args:
        tokenizer: makes the ids of the text; bytes by default.
        data: a corpus of `longrnn data build`; or files, folders and datasets, which are tokenized
            when training starts.
        part: `all` documents; or `training` and `held_out`, which divide them.

    Attributes:
        corpus: the documents of the part.
    """

    carries = True
    answers = False

    def __init__(
        self, tokenizer: Tokenizer | None = None, *, data: str | list[str], part: Part = "all"
    ) -> None:
        tokenizer = tokenizer or ByteTokenizer()
        self.vocab_size = tokenizer.vocab_size
        self.corpus = corpus_of(data, tokenizer, part, instruct=self.answers)
        self.data_sha256 = self.corpus.sha256
        self.rows, self.windows = lru_cache(4)(self._rows), lru_cache(2)(shuffled)

    def batch(
        self, index: int, rows: range, *, of: int, length: int, seed: int, carried: bool
    ) -> Batch:
        if carried:
            return self._carried(index, rows, of, length, seed)
        batch = self._independent(index, rows, of, self.rows(length, seed), length, seed)
        if self.corpus.places % length == 0:
            return batch  # all rows are full, and the weights those of the default
        count = len(self.rows(length, seed)[0])
        return batch._replace(weights=batch.answers() * (count / self.corpus.places))

    def documents(self, index: int, rows: range, *, of: int, length: int, seed: int) -> list[Batch]:
        """See `Task.documents`; rows end in padding, up to the longest document of all rows."""
        starts = self.corpus.order(f"{seed}/0")[0]
        stops = np.append(starts[1:], self.corpus.places)
        predicted = stops > starts  # a document of one token predicts nothing
        spans = starts[predicted], stops[predicted]
        batch = self._independent(index, rows, of, spans, None, seed)
        weight = len(spans[0]) / (self.corpus.answer_tokens if self.answers else self.corpus.places)
        return batch._replace(weights=batch.answers() * weight).split(length)

    def _independent(
        self,
        index: int,
        rows: range,
        of: int,
        spans: tuple[Whole, Whole],
        length: int | None,
        seed: int,
    ) -> Batch:
        """Rows of one epoch after another, each in a new order, padded at their ends.

        Args:
            index: see `Task.batch`, also for the other arguments.
            rows: of this process.
            of: how many rows all processes have.
            spans: the place of the first token of each row of an epoch, and that after its last.
            length: of the rows; None for that of the longest one in the batch of all processes.
            seed: of the run.
        """
        starts, stops = spans
        count = len(starts)
        chosen = [
            int(self.windows(count, f"{seed}/{row // count}/rows")[row % count])
            for row in range(index * of, (index + 1) * of)
        ]
        length = length or int((stops - starts)[chosen].max())
        chosen = chosen[rows.start : rows.stop]
        places = starts[chosen, None] + np.arange(length)
        real = places < stops[chosen, None]
        tokens, targets, begins = self.corpus.window(np.where(real, places, 0), f"{seed}/0")
        is_token = torch.from_numpy(real)
        begins[:, 0] = True
        batch = Batch(
            tokens.where(is_token, 0), targets.where(is_token, UNSCORED), begins & is_token
        )
        return batch if real.all() else batch._replace(is_token=is_token)

    def _carried(self, index: int, rows: range, of: int, length: int, seed: int) -> Batch:
        """Segment `index` of each row, which reads its share of every epoch."""
        edges = self.corpus.places * np.arange(rows.start, rows.stop + 1) // of
        first, size = edges[:-1, None], np.diff(edges)[:, None].clip(1)
        epochs, within = np.divmod(index * length + np.arange(length), size)
        tokens, targets = torch.zeros(2, *within.shape, dtype=torch.long)
        starts = torch.from_numpy(within == 0)
        for epoch in np.unique(epochs):
            is_inside = torch.from_numpy(epochs == epoch)
            window = self.corpus.window((first + within)[epochs == epoch], f"{seed}/{epoch}")
            tokens[is_inside], targets[is_inside], begins = window
            starts[is_inside] |= begins
        return Batch(tokens, targets, starts)

    def _rows(self, length: int, seed: int) -> tuple[Whole, Whole]:
        """The place of the first token of each row of an epoch, and that after its last."""
        starts = np.arange(0, self.corpus.places, length)
        return starts, np.minimum(starts + length, self.corpus.places)

    def held_out(self, count: int, *, length: int) -> Batch:
        """As many rows as there are, and as long as all documents together."""
        length = min(length, self.corpus.places)
        return super().held_out(min(count, len(self.rows(length, -1)[0])), length=length)

    def score(self, predictions: Tensor, batch: Batch) -> dict[str, Tensor]:
        """`token_accuracy`: for each token of an answer 1 where it is right, `(n,)`."""
        answers = batch.answers()
        return {"token_accuracy": (predictions == batch.targets)[answers].float()}

    def summary(self, length: int) -> str:
        """What it reads, in words, for the first line of a run."""
        lengths, places = self.corpus.lengths, self.corpus.places
        longer = f"; {(lengths - 1 > length).sum():,} of them lose what exceeds a row"
        what = f"{counted(len(lengths), 'document')} with {places:,} tokens to predict"
        return what + longer if self.answers else what


@TASKS.register("instruct")
class Instruct(Text):
    """Predict the tokens of answers; the tokens of prompts have no target.

    With the prompt `2+2=`, the completion `4` and length 4, one byte per token:

        tokens   2 + 2 =
        targets  . . . 4

    A document is a prompt with its answer, or a conversation with several. An independent row holds
    as many whole documents as fit, each from the zero state; the rest of it is padding, and a
    document that is longer than a row loses its end. Carried rows read documents without padding,
    and one that is longer than a segment continues in the next one.

    Every token of an answer has the same weight, whatever row it is in.

    `data` are tables or datasets whose rows have `prompt` and `completion`, or `messages`, or a
    corpus of them.
    """

    answers = True

    def batch(
        self, index: int, rows: range, *, of: int, length: int, seed: int, carried: bool
    ) -> Batch:
        batch = super().batch(index, rows, of=of, length=length, seed=seed, carried=carried)
        count = self.corpus.places / length if carried else len(self.rows(length, seed)[0])
        return batch._replace(weights=batch.answers() * (count / self.corpus.answer_tokens))

    def _rows(self, length: int, seed: int) -> tuple[Whole, Whole]:
        starts = self.corpus.order(f"{seed}/0")[0]
        ends = [*starts[1:].tolist(), self.corpus.places]
        cuts = [0]
        while cuts[-1] < len(ends):
            fitting = bisect_right(ends, int(starts[cuts[-1]]) + length, cuts[-1])
            cuts.append(max(fitting, cuts[-1] + 1))
        first = starts[cuts[:-1]]
        return first, np.minimum(first + length, np.array(ends)[np.array(cuts[1:]) - 1])
