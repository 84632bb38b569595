"""Tasks of random sequences, such as reversing, on held-out sequences."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any

import torch

from longrnn.config import read_recorded
from longrnn.data import TASKS, SequenceTask
from longrnn.errors import UserError, nearest
from longrnn.evaluation.base import Evaluation, Item, Plan, Results, Sample, within
from longrnn.evaluation.options import SequenceOptions
from longrnn.hf.names import resolve
from longrnn.hf.opened import OpenCheckpoint
from longrnn.intervals import SCORE
from longrnn.models.finite import refuse_nonfinite
from longrnn.progress import Progress
from longrnn.reporting.tables import Column
from longrnn.results import Result


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
                Item({"task": spec, "length": length, "index": index}, (task, length, index))
                for length in reached
                for index in range(min(self.options.n, task.n_held_out))
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
    def measure(
        self, model: OpenCheckpoint, items: Sequence[Item], progress: Progress
    ) -> Iterator[Results]:
        most = self.options.batch_size
        for (length, _), same in groupby(items, lambda i: (i.spec[1], i.spec[2] // most)):
            part = list(same)
            task, first, last = part[0].spec[0], part[0].spec[2], part[-1].spec[2]
            batch = task.evaluation_batch(first, last + 1, length=length)
            batch = batch.row(*(item.spec[2] - first for item in part))
            state = model.model.init_state(len(part))
            tokens = batch.tokens.to(state.position.device)
            logits = model.model(tokens, state).logits
            refuse_nonfinite(logits, model.model, tokens, state)
            scores = task.score(logits.argmax(-1).cpu(), batch)
            progress.advance(len(part), tokens.numel())
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
