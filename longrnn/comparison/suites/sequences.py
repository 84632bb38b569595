"""Tasks of random sequences, such as recall, in a suite."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from longrnn.comparison.suites.base import (
    EVALUATIONS,
    Evaluation,
    Measurement,
    Metric,
    sorted_lengths,
)
from longrnn.data import TASKS, SequenceTask
from longrnn.errors import UserError, nearest
from longrnn.evaluation import sequences
from longrnn.hf.opened import OpenCheckpoint
from longrnn.inference.engine import out_of_reach
from longrnn.intervals import paired_share_or_mean, share_or_mean


@EVALUATIONS.register("task")
class Sequences(Evaluation):
    """Share of right answers on held-out sequences of a task, by length.

    Args:
        title: see `Evaluation`.
        seed: seed of the held-out sequences.
        task: a sequence task with its options, such as `{kind: recall, vocab_size: 64}`.
        lengths: lengths of the sequences, as the task counts them.
        n: number of sequences per length.
        batch_size: sequences in one batch.
    """

    GROWING: ClassVar[tuple[str, ...]] = ("lengths", "n", "batch_size")

    def __init__(
        self,
        title: str,
        seed: int,
        *,
        task: dict[str, Any],
        lengths: list[str],
        n: int = 200,
        batch_size: int = 64,
    ) -> None:
        super().__init__(title, seed)
        self.task = build_sequence_task({"seed": seed, **task})
        self.lengths, self.n, self.batch_size = sorted_lengths(lengths), n, batch_size
        if n < 1 or batch_size < 1:
            raise UserError("n and batch_size must be at least 1: set them to positive numbers")
        if n > self.task.n_held_out:
            raise UserError(
                f"n must be at most the {self.task.n_held_out} sequences that the task holds out, "
                f"not {n}: lower n, or set held_out in task"
            )
        self.widths = {length: self.task.width(length) for length in self.lengths}
        self._metric = Metric(
            f"{title}, share of right answers", share_or_mean, paired_share_or_mean
        )

    @staticmethod
    def derived_options(options: Mapping[str, Any]) -> dict[str, Any]:
        """The task with its defaults, but for a seed, which by default is that of the suite."""
        given = options.get("task", {})  # a damaged record may lack it
        whole = TASKS.complete(given)
        return {"task": {k: v for k, v in whole.items() if k != "seed" or k in given}}

    def prepare(self, models: Sequence[OpenCheckpoint]) -> None:
        for model in models:
            if model.model.vocab_size < self.task.vocab_size:
                raise UserError(
                    f"the task of {self.title} has {self.task.vocab_size} ids and {model.name} "
                    f"{model.model.vocab_size}: set a smaller vocab_size in task"
                )

    def measure(self, model: OpenCheckpoint, output: Path, *, quiet: bool) -> list[Measurement]:
        found = []
        for length in self.lengths:
            reason = out_of_reach(model.model, self.widths[length])
            samples: dict[str, Any] = {}
            if reason is None:
                rows = sequences.evaluate(
                    model.model,
                    self.task,
                    length=length,
                    n=self.n,
                    # Results of one length have a header of their own.
                    output=output.with_name(f"{output.stem}-{length}{output.suffix}"),
                    batch_size=self.batch_size,
                    quiet=quiet,
                )
                samples = {str(row["index"]): float(row["token_accuracy"]) for row in rows}
            found.append(Measurement(self._metric, length, samples, reason))
        return found


def build_sequence_task(spec: Mapping[str, Any]) -> SequenceTask:
    """Return the sequence task of `{kind: …, option: value, …}`.

    Raises:
        UserError: an unknown kind or option, or a task of another family.
    """
    known = [name for name, task in TASKS.items() if issubclass(task, SequenceTask)]
    kind = spec.get("kind")
    if kind not in known:
        raise UserError(f"{kind!r} is not a sequence task: {nearest(str(kind), known)}")
    task = TASKS.build(spec, None)
    assert isinstance(task, SequenceTask)
    return task
