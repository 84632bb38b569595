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

    def prepare(self, models: Sequence[OpenCheckpoint]) -> None:
        given: Any = {"kind": self.task} if isinstance(self.task, str) else dict(self.task or {})
        source = models[0].source
        trained = read_recorded(resolve(models[0].checkpoint)) if source else {}
        recorded = trained.get("task", {})
        known = [name for name, task in TASKS.items() if issubclass(task, SequenceTask)]
        self._kind = str(given.get("kind", recorded.get("kind")))
        if self._kind not in known:
            if "kind" not in given:
                raise UserError(
                    f"{models[0].name} was not trained on a sequence task: give --task, one of "
                    f"{', '.join(sorted(known))}"
                )
            raise UserError(f"unknown sequence task {self._kind!r}: {nearest(self._kind, known)}")
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
                f"{models[0].name} was not trained on {self._kind}: give --vocab-size and --lengths"
            )
        task: Any = TASKS.build({**given, "kind": self._kind}, None)
        self._task = task
        for model in models:
            if model.model.vocab_size < self._task.vocab_size:
                raise UserError(
                    f"{self._kind} with vocab_size {self._task.n_tokens} needs a model with "
                    f"{self._task.vocab_size} ids, and {model.name} has {model.model.vocab_size}: "
                    "give the vocab_size that it was trained with"
                )
        if self.n is not None and self.n > self._task.n_held_out:
            raise UserError(
                f"there are {self._task.n_held_out} held-out sequences: give n of at most that, "
                f"not {self.n}"
            )

    def protocol(self, model: OpenCheckpoint) -> dict[str, Any]:
        return {"task": self._kind, **self._task.options()}

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
            scores = {name: values.tolist() for name, values in found.items()}
            progress.advance(len(part), tokens.numel())
            yield [
                (item, {name: values[row] for name, values in scores.items()})
                for row, item in enumerate(part)
            ]

    def columns(self, model: OpenCheckpoint, found: Found) -> list[Measurement]:
        measurements = []
        for length in self.lengths or ():
            rows = {item.spec[1]: row for item, row in found if item.spec[0] == length}
            reason = self._reason(model, length)
            names = dict.fromkeys(name for row in rows.values() for name in row) or ("exact_match",)
            for name in names:
                samples = {str(index): float(row[name]) for index, row in rows.items()}
                title = f"{self.title}, {name.replace('_', ' ')}"
                column = Column(title, SCORES.get(name, SCORE), ".3f")
                measurements.append(Measurement(column, length, samples, reason))
            conditions: dict[str, dict[str, float]] = {}
            for index, row in rows.items():
                if (condition := self._task.condition(index)) is not None:
                    conditions.setdefault(condition, {})[str(index)] = float(row["exact_match"])
            for condition, samples in conditions.items():
                column = Column(condition, SCORE, ".3f", drawn=False)
                measurements.append(Measurement(column, length, samples))
        return measurements

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
