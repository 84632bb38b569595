"""Loss and exact match of answers to prompts in a suite."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import torch

from longrnn import processes
from longrnn.comparison.suites.base import EVALUATIONS, Evaluation, Measurement, Metric
from longrnn.data import TASKS
from longrnn.data.stream import shuffled
from longrnn.errors import UserError
from longrnn.hf.opened import OpenCheckpoint
from longrnn.inference.engine import Pair, out_of_reach, score
from longrnn.intervals import Estimate, paired_share_or_mean, ratio_mean, share_or_mean
from longrnn.progress import Progress
from longrnn.results import Results, Row
from longrnn.units import check_count

# Documents whose rows are written together, and whose common beginnings are read once.
TOGETHER = 64


class Answered(NamedTuple):
    """The answers of one document: their loss in nats, and how many tokens they have."""

    nats: float
    tokens: int


@EVALUATIONS.register("answers")
class Answers(Evaluation):
    """Loss per answer token, and the share of documents whose answers are all exactly right.

    A document is a prompt with its answer, or a conversation with several. It is read from an empty
    state, each answer after everything before it. An answer is exactly right if greedy decoding
    generates it. A document is one sample.

    Args:
        title: see `Evaluation`.
        seed: of the documents that are drawn.
        corpus: a folder that `longrnn data build --instruct` wrote, with the models' tokenizer.
        part: `all` documents, or `training` or `held_out` ones (`longrnn.data.stream`).
        n: number of documents, or all if there are fewer.
        batch_size: documents in one batch.
    """

    GROWING: ClassVar[tuple[str, ...]] = ("n", "batch_size")

    def __init__(
        self,
        title: str,
        seed: int,
        *,
        corpus: str,
        part: str = "all",
        n: int = 200,
        batch_size: int = 8,
    ) -> None:
        super().__init__(title, seed)
        self.corpus, self.part, self.n, self.batch_size = corpus, part, n, batch_size
        check_count("n", n)
        check_count("batch_size", batch_size)
        self.metrics = (
            Metric(f"{title}, nats per token", _loss, _difference, ".3f"),
            Metric(f"{title}, exact match", share_or_mean, paired_share_or_mean),
        )

    def prepare(self, models: Sequence[OpenCheckpoint]) -> None:
        first = models[0]
        for other in models:
            if other.tokenizer.fingerprint() != first.tokenizer.fingerprint():
                raise UserError(
                    f"{first.name} and {other.name} have different tokenizers, and the loss of "
                    f"{self.title} is that per token: give models that share one"
                )
        spec = {"kind": "instruct", "data": self.corpus, "part": self.part}
        task: Any = TASKS.build(spec, first.tokenizer)
        self._documents, self._sha256 = task.documents, task.data_sha256()
        drawn = shuffled(len(task.documents.lengths), f"{self.seed}/answers")
        self._chosen: list[int] = drawn[: self.n].tolist()

    def measure(self, model: OpenCheckpoint, output: Path, *, quiet: bool) -> list[Measurement]:
        longest = int(self._documents.lengths[self._chosen].max())
        reason = out_of_reach(model.model, longest - 1)  # the last token is only predicted
        rows = [] if reason is not None else self._rows(model, output, quiet)
        losses = {str(row["document"]): Answered(row["nats"], row["tokens"]) for row in rows}
        right = {str(row["document"]): float(row["right"]) for row in rows}
        return [
            Measurement(metric, None, samples, reason)
            for metric, samples in zip(self.metrics, (losses, right), strict=True)
        ]

    def _rows(self, model: OpenCheckpoint, output: Path, quiet: bool) -> list[Row]:
        """Measure what is missing; return one row per document, new and earlier ones."""
        header = {
            "evaluation": "answers",
            "model": model.model.fingerprint(),
            "tokenizer": model.tokenizer.fingerprint(),
            "data": self._sha256,
        }
        results = Results(output, header)
        done = {row["document"] for row in results.rows}
        todo = processes.share([one for one in self._chosen if one not in done])
        pairs = {document: self._pairs(document) for document in todo}
        total = sum(map(len, pairs.values()))
        with Progress(f"{self.title} {model.name}", total, unit="tokens", quiet=quiet) as progress:
            for start in range(0, len(todo), TOGETHER):
                part = {document: pairs[document] for document in todo[start : start + TOGETHER]}
                results.append(self._measured(model, part, progress))
        results.collect()
        rows = {row["document"]: row for row in results.rows}
        return [rows[document] for document in self._chosen]

    def _measured(
        self, model: OpenCheckpoint, pairs: Mapping[int, Sequence[Pair]], progress: Progress
    ) -> list[Row]:
        """Measure the answers of some documents."""
        listed = [(document, pair) for document, own in pairs.items() for pair in own]
        sizes = {document: sum(len(p.continuation) for p in own) for document, own in pairs.items()}
        nats, right = dict.fromkeys(pairs, 0.0), dict.fromkeys(pairs, True)
        wanted = [pair for _, pair in listed]
        for index, found in score(
            model.model, wanted, batch_size=self.batch_size, progress=progress
        ):
            document = listed[index][0]
            nats[document] -= found.nats
            right[document] &= found.greedy
        return [
            {"document": one, "nats": nats[one], "tokens": sizes[one], "right": right[one]}
            for one in pairs
        ]

    def _pairs(self, document: int) -> list[Pair]:
        """The answers of a document, each with all tokens before it."""
        length = int(self._documents.lengths[document])
        ids = tuple(self._documents.read(document, 0, length).tolist())
        scored = self._documents.read_scored(document, 0, length).int()
        scored[0] = 0  # nothing predicts the first token
        nothing = scored.new_zeros(1)
        edges = scored.diff(prepend=nothing, append=nothing)
        starts, stops = (torch.nonzero(edges == sign)[:, 0].tolist() for sign in (1, -1))
        return [Pair(ids[:a], ids[a:b]) for a, b in zip(starts, stops, strict=True)]


def _loss(samples: Sequence[Answered]) -> Estimate:
    """Nats per token of all answers together."""
    return ratio_mean([s.nats for s in samples], [s.tokens for s in samples])


def _difference(samples: Sequence[Answered], others: Sequence[Answered]) -> Estimate:
    pairs = zip(samples, others, strict=True)
    return ratio_mean([a.nats - b.nats for a, b in pairs], [s.tokens for s in samples])
