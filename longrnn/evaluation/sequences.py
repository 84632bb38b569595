"""Tasks of random sequences, such as reversing, on held-out sequences."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any, ClassVar

import torch
from pydantic import PrivateAttr

from longrnn import processes
from longrnn.config import read_recorded
from longrnn.data import TASKS, SequenceTask
from longrnn.errors import UserError, nearest
from longrnn.evaluation.base import Column, Evaluation, Found, Item, Sample
from longrnn.evaluation.options import SequenceOptions
from longrnn.hf.load import resolve
from longrnn.hf.opened import OpenCheckpoint
from longrnn.intervals import SCORE
from longrnn.models.finite import refuse_nonfinite
from longrnn.progress import Progress
from longrnn.results import Row

# Default number of sequences, if there are as many held-out ones.
MAX_SEQUENCES = 1024


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
        self._kind = kind = str(given.get("kind", recorded.get("kind")))
        known = sorted(name for name, task in TASKS.items() if issubclass(task, SequenceTask))
        if kind not in known:
            what = f"{first.name} was not trained on a sequence task"
            if "kind" in given:
                what = f"unknown sequence task {kind!r}: {nearest(kind, known)}"
            raise UserError(f"{what}; --task is one of {', '.join(known)}")
        if kind == recorded.get("kind"):
            given = recorded | given
            self.lengths = self.lengths or [trained["length"]["max"]]
        if self.vocab_size is not None:
            given["vocab_size"] = self.vocab_size
        if "vocab_size" not in given or self.lengths is None:
            raise UserError(
                f"{first.name} was not trained on {kind}: give --vocab-size and --lengths"
            )
        self._spec = TASKS.complete({"seed": self.seed, **given, "kind": kind})
        task: Any = TASKS.build(self._spec, None)
        self._task = task
        for model in models:
            if model.model.vocab_size < task.vocab_size:
                raise UserError(
                    f"{kind} with vocab_size {task.n_tokens} needs a model with {task.vocab_size} "
                    f"ids, and {model.name} has {model.model.vocab_size}: give the vocab_size that "
                    "it was trained with"
                )
        n = min(task.n_held_out, MAX_SEQUENCES) if self.n is None else self.n
        if n > task.n_held_out:
            raise UserError(
                f"there are {task.n_held_out} held-out sequences: give n of at most that, not {n}"
            )
        column = self._column("exact_match")
        sizes = {one: task.held_out(1, length=one).tokens.shape[1] for one in self.lengths}
        for model in models:
            self._items[model.name] = [
                Item({"length": length, "index": index}, (length, index))
                for length in self.lengths
                if self.reaches(model, sizes[length], column, length)
                for index in range(n)
            ]

    def protocol(self, model: OpenCheckpoint) -> dict[str, Any]:
        return {"task": self._spec}

    @torch.no_grad()
    def measure(
        self, model: OpenCheckpoint, items: Sequence[Item], progress: Progress
    ) -> Iterator[Found]:
        most = processes.batch_size(len(items) * processes.size(), self.batch_size)
        for (length, _), same in groupby(items, lambda i: (i.spec[0], i.spec[1] // most)):
            part = list(same)
            # Sequences between them that are already measured are computed again.
            first, last = part[0].spec[1], part[-1].spec[1]
            batch = self._task.evaluation_batch(first, last + 1, length=length)
            state = model.model.init_state(last + 1 - first)
            tokens = batch.tokens.to(state.position.device)
            logits = model.model(tokens, state).logits
            refuse_nonfinite(logits, model.model, tokens, state)
            scores = self._task.score(logits.argmax(-1).cpu(), batch)
            progress.advance(len(part), tokens.numel())
            yield [
                (
                    item,
                    {name: float(values[item.spec[1] - first]) for name, values in scores.items()},
                )
                for item in part
            ]

    def samples(self, item: Item, row: Row) -> Iterator[Sample]:
        length, index = item.spec
        for name, value in row.items():
            yield Sample(self._column(name), length, str(index), value)
        if (condition := self._task.condition(index)) is not None:
            column = Column(condition, SCORE, ".3f", drawn=False)
            yield Sample(column, length, str(index), row["exact_match"])

    def _column(self, name: str) -> Column:
        return Column(f"{self.title}, {name.replace('_', ' ')}", SCORE, ".3f")
