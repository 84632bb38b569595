"""Loss and exact match of answers to prompts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any, ClassVar

from pydantic import PrivateAttr

from longrnn.data import Instruct
from longrnn.data.stream import Part, shuffled
from longrnn.errors import UserError
from longrnn.evaluation.base import Column, Evaluation, Found, Item, Sample
from longrnn.hf.opened import OpenCheckpoint
from longrnn.inference.engine import Pair, score
from longrnn.intervals import RATIO, SCORE
from longrnn.options import Count
from longrnn.progress import Progress
from longrnn.results import Row

# Documents whose rows are written together, and whose common beginnings are read once.
TOGETHER = 64


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

    _corpus: Any = PrivateAttr()
    _sha256: str = PrivateAttr()

    def prepare(self, models: Sequence[OpenCheckpoint]) -> None:
        first = models[0]
        for other in models:
            if other.tokenizer.fingerprint() != first.tokenizer.fingerprint():
                raise UserError(
                    f"{first.name} and {other.name} have different tokenizers, and the loss of "
                    f"{self.title} is that per token: give models that share one"
                )
        task = Instruct(first.tokenizer, data=self.data, part=self.part)
        self._corpus, self._sha256 = task.corpus, task.data_sha256
        lengths = self._corpus.lengths
        chosen = shuffled(len(lengths), f"{self.seed}/answers")[: self.n].tolist()
        longest = int(lengths[chosen].max()) - 1  # the last token is only predicted
        pairs = {document: self._pairs(document) for document in chosen}
        items = [Item({"document": d}, own, work=len(own)) for d, own in pairs.items()]
        for model in models:
            is_reached = self.reaches(model, longest, self._loss(), None)
            self._items[model.name] = items if is_reached else []

    def protocol(self, model: OpenCheckpoint) -> dict[str, Any]:
        return {"data": self._sha256}

    def measure(
        self, model: OpenCheckpoint, items: Sequence[Item], progress: Progress
    ) -> Iterator[Found]:
        for first in range(0, len(items), TOGETHER):
            part = items[first : first + TOGETHER]
            pairs = [pair for item in part for pair in item.spec]
            scores: list[Any] = [None] * len(pairs)
            size = self.batch_size
            for index, one in score(model.model, pairs, batch_size=size, progress=progress):
                scores[index] = one
            left, found = iter(zip(pairs, scores, strict=True)), []
            for item in part:
                own = [next(left) for _ in item.spec]
                row = {
                    "nats": -sum(one.nats for _, one in own),
                    "tokens": sum(len(pair.continuation) for pair, _ in own),
                    "right": all(one.greedy for _, one in own),
                }
                found.append((item, row))
            yield found

    def samples(self, item: Item, row: Row) -> Iterator[Sample]:
        name = str(item.key["document"])
        yield Sample(self._loss(), None, name, (row["nats"], row["tokens"]))
        match = Column(f"{self.title}, exact match", SCORE)
        yield Sample(match, None, name, float(row["right"]))

    def _loss(self) -> Column:
        return Column(f"{self.title}, nats per token", RATIO, ".3f")

    def _pairs(self, document: int) -> list[Pair]:
        """Return the answers of a document, each with all tokens before it."""
        start, stop = self._corpus.spans[document]
        ids = tuple(self._corpus.tokens[start:stop].tolist())
        # Nothing predicts the first token.
        scored = [False, *(self._corpus.scored[start + 1 : stop] == 1).tolist()]
        edges = [i for i, (a, b) in enumerate(pairwise([False, *scored, False])) if a != b]
        return [Pair(ids[:a], ids[a:b]) for a, b in zip(edges[::2], edges[1::2], strict=True)]
