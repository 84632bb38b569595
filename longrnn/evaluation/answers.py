"""Loss and exact match of answers to prompts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

from longrnn.data import Instruct
from longrnn.data.stream import Corpus, shuffled
from longrnn.errors import UserError
from longrnn.evaluation.base import Evaluation, Item, Plan, Results, Sample, within
from longrnn.evaluation.options import AnswerOptions
from longrnn.hf.opened import OpenCheckpoint, refuse_unfit
from longrnn.inference.engine import Pair, Score, score
from longrnn.intervals import RATIO, SCORE
from longrnn.progress import Progress
from longrnn.reporting.tables import Column
from longrnn.results import Result


class Answers(Evaluation[AnswerOptions]):
    """Loss per answer token, and the share of documents whose answers are all exactly right.

    A document is a prompt with its answer, or a conversation with several. It is read from an empty
    state, each answer after everything before it. An answer is exactly right if greedy decoding
    generates it. A document is one sample.
    """

    def plan(self, models: Sequence[OpenCheckpoint]) -> list[Plan]:
        options, first = self.options, models[0]
        for other in models:
            if other.tokenizer.fingerprint() != first.tokenizer.fingerprint():
                raise UserError(
                    f"{first.name} and {other.name} have different tokenizers, and the loss of "
                    f"{self.title} is that per token: give models that share one"
                )
            refuse_unfit(other.tokenizer, other.model, other.name)
        task = Instruct(first.tokenizer, data=options.data, part=options.part)
        corpus, digest = task.corpus, task.data_sha256
        chosen = shuffled(len(corpus.lengths), f"{options.seed}/answers")[: options.n].tolist()
        longest = int(corpus.lengths[chosen].max()) - 1  # the last token is only predicted
        items = []
        for number in chosen:
            pairs = _answers(corpus, number)
            items.append(Item({"data": digest, "document": number}, pairs, work=len(pairs)))
        fitting = [within(model, {None: longest}, self._loss()) for model in models]
        return [Plan(items if reached else [], reasons) for reached, reasons in fitting]

    def measure(
        self, model: OpenCheckpoint, items: Sequence[Item], progress: Progress
    ) -> Iterator[Results]:
        owners = [number for number, item in enumerate(items) for _ in item.spec]
        pairs = [pair for item in items for pair in item.spec]
        scores: list[list[Score]] = [[] for _ in items]
        size = self.options.batch_size
        for index, answer in score(model.model, pairs, batch_size=size, progress=progress):
            item, answers = items[owners[index]], scores[owners[index]]
            answers.append(answer)
            if len(answers) == len(item.spec):
                result = {
                    "nats": -sum(answer.nats for answer in answers),
                    "tokens": sum(len(pair.continuation) for pair in item.spec),
                    "right": all(answer.greedy for answer in answers),
                }
                yield [(item, result)]

    def samples(self, item: Item, result: Result) -> Iterator[Sample]:
        name = str(item.key["document"])
        yield Sample(self._loss(), None, name, (result["nats"], result["tokens"]))
        match = Column(f"{self.title}, exact match", SCORE)
        yield Sample(match, None, name, float(result["right"]))

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
