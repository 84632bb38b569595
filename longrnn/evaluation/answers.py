"""Loss and exact match of answers to prompts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any, ClassVar

from longrnn.data import Instruct
from longrnn.data.stream import Corpus, Part, shuffled
from longrnn.errors import UserError
from longrnn.evaluation.base import Column, Evaluation, Found, Item, Plan, Sample, within
from longrnn.hf.opened import OpenCheckpoint, refuse_unfit
from longrnn.inference.engine import Pair, Score, score
from longrnn.intervals import RATIO, SCORE
from longrnn.options import Count
from longrnn.progress import Progress
from longrnn.results import Row


class Answers(Evaluation):
    """Loss per answer token, and the share of documents whose answers are all exactly right.

    A document is a prompt with its answer, or a conversation with several. It is read from an empty
    state, each answer after everything before it. An answer is exactly right if greedy decoding
    generates it. A document is one sample.
    """

    kind: ClassVar[str] = "answers"

    # Tables or datasets of prompts and answers, or a corpus of `longrnn data build --instruct`.
    data: str | list[str]
    # All documents, or training or held_out ones.
    part: Part = "all"
    # Number of documents, or all if there are fewer.
    n: Count = 200
    # Documents in one batch.
    batch_size: Count = 8

    def plan(self, models: Sequence[OpenCheckpoint]) -> list[Plan]:
        first = models[0]
        for other in models:
            if other.tokenizer.fingerprint() != first.tokenizer.fingerprint():
                raise UserError(
                    f"{first.name} and {other.name} have different tokenizers, and the loss of "
                    f"{self.title} is that per token: give models that share one"
                )
            refuse_unfit(other.tokenizer, other.model, other.name)
        task = Instruct(first.tokenizer, data=self.data, part=self.part)
        corpus, digest = task.corpus, task.data_sha256
        chosen = shuffled(len(corpus.lengths), f"{self.seed}/answers")[: self.n].tolist()
        longest = int(corpus.lengths[chosen].max()) - 1  # the last token is only predicted
        items = [
            Item({"data": digest, "document": number}, own, work=len(own))
            for number in chosen
            for own in [_answers(corpus, number)]
        ]
        fitting = [within(model, {None: longest}, self._loss()) for model in models]
        return [Plan(items if reached else [], reasons) for reached, reasons in fitting]

    def measure(
        self, model: OpenCheckpoint, items: Sequence[Item], progress: Progress
    ) -> Iterator[Found]:
        owners = [number for number, item in enumerate(items) for _ in item.spec]
        pairs = [pair for item in items for pair in item.spec]
        scores: list[list[Score]] = [[] for _ in items]
        how: dict[str, Any] = {"batch_size": self.batch_size, "progress": progress}
        for index, one in score(model.model, pairs, **how):
            item, own = items[owners[index]], scores[owners[index]]
            own.append(one)
            if len(own) == len(item.spec):
                row = {
                    "nats": -sum(one.nats for one in own),
                    "tokens": sum(len(pair.continuation) for pair in item.spec),
                    "right": all(one.greedy for one in own),
                }
                yield [(item, row)]

    def samples(self, item: Item, row: Row) -> Iterator[Sample]:
        name = str(item.key["document"])
        yield Sample(self._loss(), None, name, (row["nats"], row["tokens"]))
        match = Column(f"{self.title}, exact match", SCORE)
        yield Sample(match, None, name, float(row["right"]))

    def _loss(self) -> Column:
        return Column(f"{self.title}, nats per token", RATIO, ".3f")


def _answers(corpus: Corpus, number: int) -> list[Pair]:
    """Return the answers of a document, each with all tokens before it."""
    assert corpus.scored is not None
    start, stop = corpus.spans[number]
    ids = tuple(corpus.tokens[start:stop].tolist())
    # Nothing predicts the first token.
    scored = [False, *(corpus.scored[start + 1 : stop] == 1).tolist()]
    edges = [i for i, (a, b) in enumerate(pairwise([False, *scored, False])) if a != b]
    return [Pair(ids[:a], ids[a:b]) for a, b in zip(edges[::2], edges[1::2], strict=True)]
