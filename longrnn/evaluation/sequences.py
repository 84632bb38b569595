"""Tasks of random sequences, such as reversing, on held-out sequences."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

import torch
from pydantic import PrivateAttr

from longrnn import processes
from longrnn.config import read_recorded
from longrnn.data import TASKS, SequenceTask
from longrnn.errors import UserError, nearest
from longrnn.evaluation.base import Column, Evaluation, Found, Item, Measurement
from longrnn.evaluation.options import SequenceOptions
from longrnn.hf.load import resolve
from longrnn.hf.opened import OpenCheckpoint
from longrnn.inference.engine import out_of_reach
from longrnn.intervals import MEAN, SCORE
from longrnn.models.finite import refuse_nonfinite
from longrnn.progress import Progress

# Default number of sequences, if there are as many held-out ones.
MAX_SEQUENCES = 1024
SCORES = {"token_accuracy": SCORE, "exact_match": SCORE, "edit_distance": MEAN}


class Sequences(SequenceOptions, Evaluation):
    """A task of random sequences, see `SequenceOptions`."""

    kind: ClassVar[str] = "task"
    reads_text: ClassVar[bool] = False

    _task: SequenceTask = PrivateAttr()
    _kind: str = PrivateAttr()
    _spec: dict[str, Any] = PrivateAttr()

    def prepare(self, models: Sequence[OpenCheckpoint]) -> None:
        first = models[0]
        given: Any = {"kind": self.task} if isinstance(self.task, str) else dict(self.task or {})
        trained = read_recorded(resolve(first.checkpoint)) if first.source else {}
        recorded = trained.get("task", {})
        known = [name for name, task in TASKS.items() if issubclass(task, SequenceTask)]
        self._kind = str(given.get("kind", recorded.get("kind")))
        if self._kind not in known and "kind" in given:
            raise UserError(f"unknown sequence task {self._kind!r}: {nearest(self._kind, known)}")
        if self._kind not in known:
            raise UserError(
                f"{first.name} was not trained on a sequence task: give --task, one of "
                f"{', '.join(sorted(known))}"
            )
        if self._kind == recorded.get("kind"):
            given = recorded | given
            if self.lengths is None and trained.get("length", {}).get("max"):
                self.lengths = [trained["length"]["max"]]
        if "seed" in self.model_fields_set:
            given.setdefault("seed", self.seed)
        if self.vocab_size is not None:
            given["vocab_size"] = self.vocab_size
        if "vocab_size" not in given or self.lengths is None:
            raise UserError(
                f"{first.name} was not trained on {self._kind}: give --vocab-size and --lengths"
            )
        self._spec = TASKS.complete({**given, "kind": self._kind})
        task: Any = TASKS.build(self._spec, None)
        self._task = task
        for model in models:
            if model.model.vocab_size < task.vocab_size:
                raise UserError(
                    f"{self._kind} with vocab_size {task.n_tokens} needs a model with "
                    f"{task.vocab_size} ids, and {model.name} has {model.model.vocab_size}: give "
                    "the vocab_size that it was trained with"
                )
        if self.n is not None and self.n > task.n_held_out:
            raise UserError(
                f"there are {task.n_held_out} held-out sequences: give n of at most that, not "
                f"{self.n}"
            )

    def protocol(self, model: OpenCheckpoint) -> dict[str, Any]:
        return {"task": self._spec}

    def items(self, model: OpenCheckpoint) -> list[Item]:
        n = self.n or min(self._task.n_held_out, MAX_SEQUENCES)
        return [
            Item({"length": length, "index": index}, (length, index))
            for length in self.lengths or ()
            if self._reason(model, length) is None
            for index in range(n)
        ]

    @torch.no_grad()
    def measure(
        self, model: OpenCheckpoint, items: Sequence[Item], progress: Progress
    ) -> Iterator[Found]:
        most = processes.batch_size(len(items) * processes.size(), self.batch_size)
        for part in _runs(items, most):
            (length, start), (_, last) = part[0].spec, part[-1].spec
            batch = self._task.evaluation_batch(start, last + 1, length=length)
            state = model.model.init_state(len(part))
            tokens = batch.tokens.to(state.position.device)
            logits = model.model(tokens, state).logits
            refuse_nonfinite(logits, model.model, tokens, state)
            found = self._task.score(logits.argmax(-1).cpu(), batch)
            progress.advance(len(part), tokens.numel())
            rows = zip(*(values.tolist() for values in found.values()), strict=True)
            yield [
                (item, dict(zip(found, values, strict=True)))
                for item, values in zip(part, rows, strict=True)
            ]

    def columns(self, model: OpenCheckpoint, found: Found) -> list[Measurement]:
        measurements = []
        for length in self.lengths or ():
            samples: dict[Column, dict[str, float]] = {}
            for item, row in found:
                if item.spec[0] != length:
                    continue
                for name, value in row.items():
                    samples.setdefault(self._column(name), {})[str(item.spec[1])] = float(value)
                if (condition := self._task.condition(item.spec[1])) is not None:
                    column = Column(condition, SCORE, ".3f", drawn=False)
                    samples.setdefault(column, {})[str(item.spec[1])] = float(row["exact_match"])
            reason = self._reason(model, length)
            for column, own in (samples or {self._column("exact_match"): {}}).items():
                measurements.append(Measurement(column, length, own, reason))
        return measurements

    def _column(self, name: str) -> Column:
        quantity = SCORES.get(name, SCORE)
        return Column(f"{self.title}, {name.replace('_', ' ')}", quantity, ".3f")

    def _reason(self, model: OpenCheckpoint, length: int) -> str | None:
        return out_of_reach(model.model, self._task.width(length))


class Reverse(Sequences):
    """Evaluate reverse ordering on held-out sequences: token accuracy, exact match, edit distance.

    This is `eval task --task reverse`.
    """

    task: str | dict[str, Any] | None = "reverse"


def _runs(items: Sequence[Item], most: int) -> Iterator[list[Item]]:
    """Yield runs of items with consecutive sequences of one length, each of at most `most`."""
    run: list[Item] = []
    for item in items:
        length, index = item.spec
        if run and (len(run) == most or run[-1].spec != (length, index - 1)):
            yield run
            run = []
        run.append(item)
    if run:
        yield run
