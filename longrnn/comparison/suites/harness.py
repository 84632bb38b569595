"""lm-eval tasks in a suite."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar

from longrnn import processes
from longrnn.comparison.suites.base import EVALUATIONS, Evaluation, Measurement, Metric
from longrnn.errors import UserError
from longrnn.evaluation.task_code import task_code
from longrnn.hf.opened import OpenCheckpoint
from longrnn.intervals import paired_share_or_mean, share_or_mean
from longrnn.results import Results, Row
from longrnn.text import read_text


@EVALUATIONS.register("harness")
class Harness(Evaluation):
    """Scores of lm-eval tasks for each document.

    Every model gets lm-eval's own requests. A model for which requests had to be truncated to its
    maximum length has a reason instead of a score. Needs lm-eval.

    Args:
        title: see `Evaluation`.
        seed: seed of few-shot examples.
        tasks: task names of `longrnn eval harness`, or YAML files.
        metrics: metrics to report; if empty, all with one number per document.
        limit: documents of each task; None for all.
        num_fewshot: examples in each prompt; None for the number in the task.
        include_path: a folder with further tasks.
        metadata: metadata of the tasks, such as `{max_seq_lengths: [1024]}`.
        datasets: a folder in which `ORGANISATION/NAME` stands for a data set on the Hub.
    """

    GROWING: ClassVar[tuple[str, ...]] = ("tasks", "metrics")

    def __init__(
        self,
        title: str,
        seed: int,
        *,
        tasks: list[str],
        metrics: list[str] = (),  # type: ignore[assignment]
        limit: int | None = None,
        num_fewshot: int | None = None,
        include_path: str | None = None,
        metadata: dict[str, Any] | None = None,
        datasets: str | None = None,
    ) -> None:
        super().__init__(title, seed)
        self.tasks, self.metrics = list(dict.fromkeys(tasks)), list(metrics)
        self.limit, self.num_fewshot = limit, num_fewshot
        self.include_path, self.metadata, self.datasets = include_path, metadata, datasets
        text = (metadata or {}).get("text")
        self.texts = [] if text is None else [Path(text)]
        if not tasks or (limit is not None and limit < 1):
            raise UserError("harness needs tasks, and a limit of at least 1 or none: set both")

    def prepare(self, models: Sequence[OpenCheckpoint]) -> None:
        if find_spec("lm_eval") is None:
            raise UserError("lm-eval is not installed: pip install lm-eval")
        from longrnn.evaluation.harness import find_tasks

        find_tasks(self.tasks, self.include_path, self.metadata)

    def task_code(self) -> list[str]:
        return task_code(self.tasks, self.include_path)

    def measure(self, model: OpenCheckpoint, output: Path, *, quiet: bool) -> list[Measurement]:
        header = {
            "evaluation": "harness",
            "model": model.model.fingerprint(),
            "tokenizer": model.tokenizer.fingerprint(),
            "texts": [read_text(path)[1] for path in self.texts],
            "limit": self.limit,
            "num_fewshot": self.num_fewshot,
            "metadata": self.metadata,
            **({} if self.datasets is None else {"datasets": self.datasets}),
        }
        results = Results(output, header)
        done = {row["task"] for row in results.rows}
        for task in self.tasks:
            if task not in done:
                # lm-eval divides the documents among processes; the main one has all scores.
                row = self._row(model, task, quiet)
                results.append([row] if processes.is_main() else [])
        results.collect()
        rows = {row["task"]: row for row in results.rows}
        return [one for task in self.tasks for one in self._measurements(rows[task])]

    def _row(self, model: OpenCheckpoint, task: str, quiet: bool) -> Row:
        """Measure one task; return its scores by metric and document, and what was truncated."""
        from longrnn.evaluation.harness import LongRNN, scores

        wrap: Any = LongRNN  # its decorator hides its parameters
        wrapped = wrap(model.model, tokenizer=model.tokenizer, quiet=quiet)
        found = scores(
            wrapped,
            [task],
            include_path=self.include_path,
            limit=self.limit,
            num_fewshot=self.num_fewshot,
            metadata={"tokenizer": model.checkpoint, **(self.metadata or {})},
            seed=self.seed,
            datasets=self.datasets,
        )
        truncated = wrapped.counts()
        cut = {
            "requests": truncated["requests"] + truncated["split_documents"],
            "reads": wrapped.limit.max_length,
        }
        return {"task": task, "cut": cut, "scores": found}

    def _measurements(self, row: Row) -> list[Measurement]:
        cut, measurements = row["cut"], []
        reason = None
        if cut["requests"]:
            reason = f"{cut['requests']} requests exceed the {cut['reads']} tokens that it reads"
        known = {name.split(", ")[-1] for name in row["scores"]}
        for name in self.metrics:
            if name not in known:
                raise UserError(
                    f"{row['task']} has no metric {name!r}: use one of {', '.join(sorted(known))}"
                )
        for name, samples in row["scores"].items():
            if not self.metrics or name.split(", ")[-1] in self.metrics:
                metric = Metric(name, share_or_mean, paired_share_or_mean, ".3f")
                measurements.append(Measurement(metric, None, {} if reason else samples, reason))
        return measurements
