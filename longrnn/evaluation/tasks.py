"""Held-out data of training tasks: answers to prompts, and sequences such as reversing."""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import torch

from longrnn.checkpoints.names import resolve
from longrnn.checkpoints.opened import OpenCheckpoint, refuse_unfit
from longrnn.config import read_recorded
from longrnn.data import TASKS, Instruct, SequenceTask
from longrnn.data.stream import Corpus, shuffled
from longrnn.errors import UserError, nearest
from longrnn.evaluation.base import Batches, Evaluation, Item, Plan, Sample, within
from longrnn.evaluation.options import AnswerOptions, SequenceOptions
from longrnn.inference.engine import Pair, Score, score
from longrnn.intervals import RATIO, SCORE
from longrnn.models.finite import refuse_nonfinite
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

    def measure(self, model: OpenCheckpoint, items: Sequence[Item], progress: Progress) -> Batches:
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


class Sequences(Evaluation[SequenceOptions]):
    """A task of random sequences, see `SequenceOptions`."""

    def plan(self, models: Sequence[OpenCheckpoint]) -> list[Plan]:
        spec, lengths = self._task(models[0])
        task: Any = TASKS.build(spec, None)
        widths = {length: task.held_out(1, length=length).tokens.shape[1] for length in lengths}
        plans = []
        for model in models:
            if model.model.vocab_size < task.vocab_size:
                raise UserError(
                    f"{spec['kind']} with vocab_size {task.n_tokens} needs a model with "
                    f"{task.vocab_size} ids, and {model.name} has {model.model.vocab_size}: give "
                    "the vocab_size that it was trained with"
                )
            reached, reasons = within(model, widths, self._column("exact_match"))
            items = [
                Item({"task": spec, "length": at, "index": row}, (task, at, row), work=at)
                for at in reached
                for row in range(min(self.options.n, task.n_held_out))
            ]
            plans.append(Plan(items, reasons))
        return plans

    def _task(self, first: OpenCheckpoint) -> tuple[dict[str, Any], Sequence[int]]:
        """Return the options of the task and the lengths, by default as in training."""
        options = self.options
        asked = options.task or {}
        given: Any = {"kind": asked} if isinstance(asked, str) else dict(asked)
        trained = read_recorded(resolve(first.checkpoint)) if first.source else {}
        recorded = trained.get("task", {})
        kind, lengths = given.get("kind", recorded.get("kind")), options.lengths
        known = [name for name, task in TASKS.items() if issubclass(task, SequenceTask)]
        if kind not in known:
            name = repr(kind) if asked else f"the training task of {first.name}"
            hint = nearest(str(kind), known)
            raise UserError(f"{name} is not a task of random sequences: give --task; {hint}")
        if kind == recorded.get("kind"):
            given, lengths = recorded | given, lengths or [trained["length"]["max"]]
        if options.vocab_size is not None:
            given["vocab_size"] = options.vocab_size
        if "vocab_size" not in given or lengths is None:
            raise UserError(
                f"{first.name} was not trained on {kind}: give --vocab-size and --lengths"
            )
        return TASKS.complete({"seed": options.seed, **given, "kind": kind}), lengths

    @torch.no_grad()
    def measure(self, model: OpenCheckpoint, items: Sequence[Item], progress: Progress) -> Batches:
        for part in self.batched(items, self.options.batch_size):
            task, length, first = part[0].spec
            batch = task.evaluation_batch(first, part[-1].spec[2] + 1, length=length)
            batch = batch.row(*(item.spec[2] - first for item in part))
            state = model.model.init_state(len(part))
            tokens = batch.tokens.to(state.position.device)
            logits = model.model(tokens, state).logits
            refuse_nonfinite(logits, model.model, tokens, state)
            scores = task.score(logits.argmax(-1).cpu(), batch)
            progress.advance(len(part) * length, tokens.numel())
            yield [
                (item, {name: float(values[row]) for name, values in scores.items()})
                for row, item in enumerate(part)
            ]

    def samples(self, item: Item, result: Result) -> Iterator[Sample]:
        task, length, index = item.spec
        for name, value in result.items():
            yield Sample(self._column(name), length, str(index), value)
        if (condition := task.condition(index)) is not None:
            column = Column(condition, SCORE, ".3f", drawn=False)
            yield Sample(column, length, str(index), result["exact_match"])

    def _column(self, name: str) -> Column:
        return Column(f"{self.title}, {name.replace('_', ' ')}", SCORE, ".3f")
