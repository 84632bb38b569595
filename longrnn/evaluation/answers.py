"""Loss and exact match of answers to prompts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any, ClassVar

from pydantic import Field, PrivateAttr

from longrnn.data import Instruct
from longrnn.data.stream import shuffled
from longrnn.errors import UserError
from longrnn.evaluation.base import Column, Evaluation, Found, Item, Measurement
from longrnn.hf.opened import OpenCheckpoint
from longrnn.inference.engine import Pair, out_of_reach, score
from longrnn.intervals import RATIO, SCORE
from longrnn.options import Count
from longrnn.progress import Progress

# Documents whose rows are written together, and whose common beginnings are read once.
TOGETHER = 64


class Answers(Evaluation):
    """Loss per answer token, and the share of documents whose answers are all exactly right.

    A document is a prompt with its answer, or a conversation with several. It is read from an empty
    state, each answer after everything before it. An answer is exactly right if greedy decoding
    generates it. A document is one sample.
    """

    kind: ClassVar[str] = "answers"

    data: str | list[str] = Field(
        description="Tables or datasets of prompts and answers, or a corpus of "
        "`longrnn data build --instruct`."
    )
    part: str = Field(default="all", description="all documents, or training or held_out ones.")
    n: Count = Field(default=200, description="Number of documents, or all if there are fewer.")
    batch_size: Count = Field(default=8, description="Documents in one batch.")

    _documents: Any = PrivateAttr()
    _sha256: str = PrivateAttr()
    _chosen: list[int] = PrivateAttr()

    def prepare(self, models: Sequence[OpenCheckpoint]) -> None:
        first = models[0]
        for other in models:
            if other.tokenizer.fingerprint() != first.tokenizer.fingerprint():
                raise UserError(
                    f"{first.name} and {other.name} have different tokenizers, and the loss of "
                    f"{self.title} is that per token: give models that share one"
                )
        task = Instruct(first.tokenizer, data=self.data, part=self.part)
        self._documents, self._sha256 = task.documents, task.data_sha256()
        drawn = shuffled(len(task.documents.lengths), f"{self.seed}/answers")
        self._chosen = drawn[: self.n].tolist()

    def protocol(self, model: OpenCheckpoint) -> dict[str, Any]:
        return {"data": self._sha256}

    def items(self, model: OpenCheckpoint) -> list[Item]:
        if self._reason(model) is not None:
            return []
        pairs = {document: self._pairs(document) for document in self._chosen}
        return [Item({"document": d}, own, work=len(own)) for d, own in pairs.items()]

    def measure(
        self, model: OpenCheckpoint, items: Sequence[Item], progress: Progress
    ) -> Iterator[Found]:
        for first in range(0, len(items), TOGETHER):
            part = items[first : first + TOGETHER]
            owners = [row for row, item in enumerate(part) for _ in item.spec]
            pairs = [pair for item in part for pair in item.spec]
            size = self.batch_size
            nats, right = [0.0] * len(part), [True] * len(part)
            for index, found in score(model.model, pairs, batch_size=size, progress=progress):
                nats[owners[index]] -= found.nats
                right[owners[index]] &= found.greedy
            tokens = [sum(len(pair.continuation) for pair in item.spec) for item in part]
            yield [
                (item, {"nats": nats[row], "tokens": tokens[row], "right": right[row]})
                for row, item in enumerate(part)
            ]

    def columns(self, model: OpenCheckpoint, found: Found) -> list[Measurement]:
        rows = {str(item.key["document"]): row for item, row in found}
        losses = {name: (row["nats"], row["tokens"]) for name, row in rows.items()}
        right = {name: float(row["right"]) for name, row in rows.items()}
        reason = self._reason(model)
        loss = Column(f"{self.title}, nats per token", RATIO, ".3f")
        match = Column(f"{self.title}, exact match", SCORE)
        return [Measurement(loss, None, losses, reason), Measurement(match, None, right, reason)]

    def _reason(self, model: OpenCheckpoint) -> str | None:
        longest = int(self._documents.lengths[self._chosen].max())
        return out_of_reach(model.model, longest - 1)  # the last token is only predicted

    def _pairs(self, document: int) -> list[Pair]:
        """Return the answers of a document, each with all tokens before it."""
        length = int(self._documents.lengths[document])
        ids = tuple(self._documents.read(document, 0, length).tolist())
        scored = self._documents.read_scored(document, 0, length).tolist()
        scored[0] = False  # nothing predicts the first token
        edges = [i for i, (a, b) in enumerate(pairwise([False, *scored, False])) if a != b]
        return [Pair(ids[:a], ids[a:b]) for a, b in zip(edges[::2], edges[1::2], strict=True)]
