"""lm-eval tasks as an evaluation, with scores for each document."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar

from pydantic import Field

from longrnn.errors import UserError
from longrnn.evaluation.base import Column, Evaluation, Found, Item, Plan, Sample
from longrnn.evaluation.task_code import task_code
from longrnn.hf.opened import OpenCheckpoint
from longrnn.intervals import SCORE
from longrnn.options import Count
from longrnn.progress import Progress
from longrnn.results import Row
from longrnn.text import read_text


class Harness(Evaluation):
    """Scores of lm-eval tasks for each document.

    Every model gets lm-eval's own requests. A model for which requests had to be truncated to its
    maximum length has a reason instead of a score. Needs lm-eval.
    """

    kind: ClassVar[str] = "harness"
    sharing: ClassVar[str] = "inside"

    tasks: list[str] = Field(
        min_length=1, description="Task names of `longrnn eval harness`, or YAML files."
    )
    metrics: list[str] = Field(
        default=[], description="Metrics to report (default: all with one number per document)."
    )
    limit: Count | None = Field(default=None, description="Documents of each task (default: all).")
    include_path: str | None = Field(default=None, description="A folder with further tasks.")
    metadata: dict[str, Any] | None = Field(
        default=None, description="Metadata of the tasks, such as {max_seq_lengths: [1024]}."
    )

    def files(self) -> list[Path]:
        text = (self.metadata or {}).get("text")
        return [] if text is None else [Path(text)]

    def task_code(self) -> list[str]:
        return task_code(self.tasks, self.include_path)

    def plan(self, models: Sequence[OpenCheckpoint]) -> list[Plan]:
        if find_spec("lm_eval") is None:
            raise UserError("lm-eval is not installed: pip install lm-eval")
        from longrnn.evaluation.harness import find_tasks

        find_tasks(self.tasks, self.include_path, self.metadata)
        items = [Item({"task": task}, task) for task in dict.fromkeys(self.tasks)]
        return [Plan(items, []) for _ in models]

    def protocol(self, model: OpenCheckpoint) -> dict[str, Any]:
        return {
            "texts": [read_text(path)[1] for path in self.files()],
            "limit": self.limit,
            "metadata": self.metadata,
            "seed": self.seed,
        }

    def measure(
        self, model: OpenCheckpoint, items: Sequence[Item], progress: Progress
    ) -> Iterator[Found]:
        from lm_eval import simple_evaluate

        from longrnn.evaluation.harness import LongRNN, explained, find_tasks

        evaluate: Any = simple_evaluate
        for item in items:
            wrapped = LongRNN(model.model, tokenizer=model.tokenizer, quiet=True)
            metadata = {"tokenizer": model.checkpoint, **(self.metadata or {})}
            with explained():
                manager, names = find_tasks([item.spec], self.include_path, metadata)
                results = evaluate(
                    model=wrapped,
                    tasks=names,
                    task_manager=manager,
                    metadata=metadata,
                    limit=self.limit,
                    fewshot_random_seed=self.seed,
                    bootstrap_iters=0,
                )
            progress.advance(1, wrapped.counts["computed"])
            # Only the main process gets results.
            found = _scores((results or {"samples": {}})["samples"])
            cut = {"requests": wrapped.counts["truncated"], "reads": wrapped.max_length}
            yield [(item, {"cut": cut, "scores": found})]

    def samples(self, item: Item, row: Row) -> Iterator[Sample]:
        cut, reason = row["cut"], None
        if cut["requests"]:
            reason = f"{cut['requests']} requests exceed the {cut['reads']} tokens that it reads"
        known = {name: name.split(", ")[-1] for name in row["scores"]}
        for name in set(self.metrics) - set(known.values()):
            raise UserError(
                f"{item.spec} has no metric {name!r}: use one of "
                f"{', '.join(sorted(set(known.values())))}"
            )
        for name, metric in known.items():
            if not self.metrics or metric in self.metrics:
                column = Column(name, SCORE, ".3f")
                for document, value in row["scores"][name].items():
                    yield Sample(column, None, document, value, reason)


def _scores(samples: Mapping[str, Sequence[dict[str, Any]]]) -> dict[str, dict[str, float]]:
    """Return the metrics with one number per document.

    Returns:
        Numbers by document under `TASK, METRIC`, or `TASK, FILTER, METRIC` for a task with filters.
    """
    found: dict[str, dict[str, float]] = {}
    for task, rows in samples.items():
        for row in rows:
            which = [task] if row["filter"] == "none" else [task, row["filter"]]
            for metric in row["metrics"]:
                value = row[metric]
                # RULER gives −1 under the lengths that are not that of the document.
                other_length = metric.isdecimal() and value == -1
                if isinstance(value, (bool, int, float)) and not other_length:
                    column = found.setdefault(", ".join([*which, metric]), {})
                    column[str(row["doc_id"])] = float(value)
    return found
