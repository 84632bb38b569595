"""lm-eval tasks as an evaluation: a score per document, by task and length.

Notable choices:
- Few-shot examples are drawn with a seed per document: `lm_eval.evaluate` draws them without one.
- The key of a document has a digest of its prompts and of the files of functions that score them.
"""

import hashlib
import io
import json
import logging
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import redirect_stdout
from inspect import findsource
from itertools import chain
from typing import Any, NamedTuple
from unittest.mock import patch

import lm_eval
import numpy as np
from lm_eval.api import task as task_module
from lm_eval.api.registry import get_aggregation

from longrnn.checkpoints.opened import OpenCheckpoint
from longrnn.errors import UserError
from longrnn.evaluation.base import Batches, Evaluation, Item, Plan, Reasons, Sample, within
from longrnn.evaluation.harness.command import explained, prepared, task_manager
from longrnn.evaluation.harness.lm import LongRNN
from longrnn.evaluation.harness.local_data import first_samples, refuse_missing
from longrnn.evaluation.options import HarnessOptions
from longrnn.files import one_line
from longrnn.intervals import SCORE
from longrnn.progress import Progress
from longrnn.reporting.tables import Column
from longrnn.results import Result
from longrnn.units import format_length

# Samples that RULER makes of each length.
RULER_SAMPLES = 500
# How lm-eval computes metrics without a number per document, and what is said of them.
AGGREGATIONS = "weighted_perplexity bits_per_byte f1 matthews_corrcoef bleu chrf ter brier_score"
OF_ALL_DOCUMENTS = {get_aggregation(name) for name in AGGREGATIONS.split()}
OF_ALL = "have no number per document: use `longrnn eval harness` without --lengths"


class TaskDocument(NamedTuple):
    """A document of a task, which its key names."""

    task: Any
    number: int


class HarnessTasks(Evaluation[HarnessOptions]):
    """lm-eval tasks, see `HarnessOptions`."""

    def plan(self, models: Sequence[OpenCheckpoint]) -> list[Plan]:
        options = self.options
        logging.getLogger("lm_eval").setLevel(logging.ERROR)
        if options.data is not None:
            refuse_missing(options.data, options.tasks)
        made: dict[str, tuple[list[Item], Reasons]] = {}
        plans = []
        for model in models:
            print_of = model.tokenizer.fingerprint()
            if print_of not in made:
                made[print_of] = self._documents(model)
            items, failures = made[print_of]
            reasons = dict(failures)
            for name, length in dict.fromkeys(item.group for item in items):
                if length is not None:
                    most = min(length, options.chunk_select or length)
                    reasons |= within(model, {length: most}, column(name))[1]
            reached = [i for i in items if (column(i.key["task"]), i.key["length"]) not in reasons]
            plans.append(Plan(reached, reasons))
        return plans

    def protocol(self, model: OpenCheckpoint) -> dict[str, Any]:
        return self.options.model_dump(include={"chunk_select"}, exclude_none=True)

    def _documents(self, model: OpenCheckpoint) -> tuple[list[Item], Reasons]:
        """Return the documents of all tasks and lengths, and why others cannot be made."""
        options = self.options
        # lm-eval reads the values at each load.
        named = "" if model.source is None else model.source.tokenizer
        metadata: dict[str, Any] = {"tokenizer": named}
        manager = task_manager(options.tasks)(options.include_path, metadata)
        items: list[Item] = []
        failures: Reasons = {}
        for name in options.tasks:
            if not name.endswith(".yaml") and not manager.match_tasks([name]):
                raise UserError(f"lm-eval has no task {name}: `lm-eval ls tasks` lists them")
            for length in options.lengths or [None]:
                if length is not None:
                    # The lengths of BABILong are names of configurations.
                    is_named = name.startswith("babilong")
                    metadata["max_seq_lengths"] = format_length(length) if is_named else [length]
                try:
                    tasks = self._load(manager, name)
                except UserError as error:
                    failures[column(name), length] = reason(error)
                    continue
                has_lengths = {n: callable(t.config.custom_dataset) for n, t in tasks.items()}
                if length is not None and not any(has_lengths.values()):
                    raise UserError(
                        f"{name} makes no prompts of a length: leave it or --lengths out"
                    )
                for task_name, task in tasks.items():
                    at, metrics = length if has_lengths[task_name] else None, task.aggregation()
                    if metrics and OF_ALL_DOCUMENTS.issuperset(metrics.values()):
                        names = ", ".join(metrics)
                        failures[column(task_name), at] = f"{names} of {task_name} {OF_ALL}"
                    else:
                        items += self._items(task, task_name, at)
        if not items:
            raise UserError(next(iter(failures.values())))
        return items, failures

    def _load(self, manager: Any, name: str) -> dict[str, Any]:
        """Return lm-eval's tasks of a name, which has several if it is that of a group."""
        options = self.options
        with (
            prepared(options.data),
            redirect_stdout(io.StringIO()),
            first_samples(name, options.n or RULER_SAMPLES),
        ):
            tasks = manager.load([name])["tasks"]
            for task in tasks.values():
                seed_examples(task)
                if options.num_fewshot is not None:
                    task.set_config("num_fewshot", options.num_fewshot)
                if options.gen_kwargs and task.OUTPUT_TYPE == "generate_until":
                    task.set_config("generation_kwargs", options.gen_kwargs, update=True)
                # Where not ten words fit, `ruler_cwe` has samples without an answer.
                if any(document.get("outputs") == [] for document in task.eval_docs):
                    raise UserError(
                        f"{name} has no answer at this length with this tokenizer: give greater "
                        "lengths"
                    )
        return tasks

    def _items(self, task: Any, name: str, length: int | None) -> list[Item]:
        documents = [*task.eval_docs][: self.options.n]
        # lm-eval reads all of them again for each batch.
        task.doc_iterator = lambda samples, **how: enumerate(documents[n] for n in samples)
        # Without what says where the data and the tokenizer are.
        config = {**vars(task.config), "dataset_kwargs": None, "metadata": task.VERSION}
        about, shots, items = digest(config), task.config.num_fewshot or 0, []
        counts: Counter[str] = Counter()
        for number, document in enumerate(documents):
            with explained():
                prefix = task.doc_to_prefix(document)
                context = task.fewshot_context(document, num_fewshot=shots, gen_prefix=prefix)
                asked = task.construct_requests(doc=document, ctx=context)
                which = digest([about, document, asked, task.doc_to_target(document)])
            again = f"-{counts[which]}" if counts[which] else ""  # of equal documents each counts
            counts[which] += 1
            key = {"task": name, "length": length, "document": which + again}
            items.append(Item(key, TaskDocument(task, number), (name, length)))
        return items

    def measure(self, model: OpenCheckpoint, items: Sequence[Item], progress: Progress) -> Batches:
        size = self.options.batch_size
        how = {"batch_size": size, "chunk_select": self.options.chunk_select, "quiet": True}
        lm: Any = LongRNN(model.model, tokenizer=model.tokenizer, **how)
        lm._rank, lm._world_size = 0, 1  # the items of this process are its own
        evaluate: Any = lm_eval.evaluate
        for part in self.batched(items, size, "group"):
            numbers, computed = [item.spec.number for item in part], lm.counts["computed"]
            name, task = part[0].key["task"], part[0].spec.task
            tasks = {"tasks": {name: task}, "groups": {}}
            with explained(), patch.object(task_module, "tqdm", lambda rows, **how: rows):
                found = evaluate(lm, tasks, samples={name: numbers}, bootstrap_iters=0)
            progress.advance(len(part), lm.counts["computed"] - computed)
            results: dict[int, Result] = {}
            for sample in found["samples"][name]:
                result = results.setdefault(sample["doc_id"], {"scores": {}})
                result["scores"] |= scores_of(sample)
                if task.OUTPUT_TYPE == "generate_until":
                    result["said"] = sample["resps"][0][0]
            yield [(item, results[item.spec.number]) for item in part]

    def samples(self, item: Item, result: Result) -> Iterator[Sample]:
        for metric, value in result["scores"].items():
            name = ", ".join(filter(None, (item.key["task"], metric)))
            if value is not None:
                yield Sample(column(name), item.key["length"], item.key["document"], value)

    def notes(self, results: Mapping[str, list[tuple[Item, Result]]]) -> list[str]:
        names = dict.fromkeys(
            f"{item.key['task']}, {metric}"
            for item, result in chain(*results.values())
            for metric, value in result["scores"].items()
            if value is None
        )
        return [f"{'; '.join(names)} {OF_ALL}."] if names else []


def digest(value: Any) -> str:
    """Return 16 hexadecimal digits of the SHA-256 of a value as JSON."""
    text = json.dumps(value, sort_keys=True, default=without_address)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def without_address(value: Any) -> str:
    """Return the file of a function, or the text of another value: the same in every process."""
    try:
        return "".join(findsource(value)[0])
    except (OSError, TypeError):
        return re.sub(r" at 0x\w+", "", str(value))


def seed_examples(task: Any) -> None:
    """Draw the few-shot examples of each document with a seed that follows from the document."""
    build = task.fewshot_context

    def fewshot_context(doc: Any, *arguments: Any, **options: Any) -> Any:
        task.set_fewshot_seed(int(digest(doc), 16))
        return build(doc, *arguments, **options)

    task.fewshot_context = fewshot_context


def reason(error: UserError) -> str:
    """Return why lm-eval failed, as a cell of a table has it."""
    cause = error.__cause__
    if cause is None:
        return one_line(error)
    remedy = "; give its files by --data FOLDER" if isinstance(cause, ConnectionError) else ""
    return f"lm-eval: {type(cause).__name__}: {one_line(cause)}{remedy}"


def column(name: str) -> Column:
    """Return the column of a task, or of one of its metrics."""
    return Column(name, SCORE, ".3f")


def scores_of(sample: Mapping[str, Any]) -> dict[str, float | None]:
    """Return the metrics of a sample of lm-eval by name; None for what is not one number."""
    kinds = bool | int | float | np.number | np.bool_
    numbers = {
        metric: float(sample[metric]) if isinstance(sample[metric], kinds) else None
        for metric in sample["metrics"]
    }
    # RULER names its score by the length, and gives −1 under the other lengths.
    of_ruler = [value for metric, value in numbers.items() if metric.isdecimal() and value != -1]
    if of_ruler:
        return {"": of_ruler[0]}
    prefix = "" if sample["filter"] == "none" else f"{sample['filter']}, "
    return {f"{prefix}{metric}": value for metric, value in numbers.items()}
