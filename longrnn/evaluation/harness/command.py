"""The command line of lm-eval with the model type `longrnn` and the tasks in `eval/tasks`."""

from __future__ import annotations

import io
import json
import logging
import os
import sys
from argparse import Namespace
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stderr
from pathlib import Path
from typing import Any
from unittest.mock import patch

from lm_eval import loggers, simple_evaluate
from lm_eval.__main__ import HarnessCLI
from lm_eval.config.evaluate_config import EvaluatorConfig
from lm_eval.tasks import TaskManager
from lm_eval.utils import setup_logging

from longrnn.bundled import bundled
from longrnn.errors import UserError, nearest
from longrnn.evaluation.harness.lm import LongRNN
from longrnn.evaluation.harness.resources import task_resources
from longrnn.evaluation.task_code import refuse_task_code, task_code
from longrnn.files import one_line

# Warnings that lm-eval logs for each of our tasks although nothing is wrong.
HINTS = ("Custom kwargs can be passed", "No aggregation function defined")
NO_TASK = "name what to measure: --tasks longrnn_passkey, for example"
LOG_LEVEL = "LMEVAL_LOG_LEVEL"


def run(
    checkpoint: str,
    arguments: Sequence[str],
    options: dict[str, Any],
    *,
    datasets: str | Path | None = None,
    trust_task_code: bool = False,
) -> None:
    """Run `lm-eval run` for a checkpoint; lm-eval parses its arguments, and writes and prints.

    Args:
        checkpoint: a checkpoint as `load` takes it.
        arguments: command line arguments of `lm-eval run`.
        options: options of `LongRNN`; those in `--model_args` take precedence.
        datasets: a folder with data sets, see `task_resources`.
        trust_task_code: whether to run Python code in task files of the user.

    Raises:
        UserError: an unknown option, task or folder, or code that is not trusted.
    """
    if LOG_LEVEL in os.environ:
        setup_logging()
    given = {"pretrained": checkpoint, **options}
    device = ["--device", str(given.pop("device"))] if "device" in given else []
    ours = ["--batch_size", "auto", "--model_args", json.dumps(given), *device]
    parsed = _parse([*ours, *arguments, "--model", "longrnn"])
    if not parsed.tasks and not parsed.config:
        raise UserError(NO_TASK)
    with _explained(), task_resources(datasets), _own_tasks(trust_task_code):
        parsed.func(parsed)


def scores(
    model: LongRNN,
    tasks: Sequence[str],
    *,
    include_path: str | None = None,
    metadata: dict[str, Any] | None = None,
    datasets: str | Path | None = None,
    **options: Any,
) -> dict[str, dict[str, float]]:
    """Return the scores of a model for each document of tasks.

    Args:
        model: an lm-eval model.
        tasks: names, or YAML files.
        include_path: a folder with further tasks.
        metadata: metadata of the tasks.
        datasets: a folder with data sets, see `task_resources`.
        options: of lm-eval's `simple_evaluate`, such as `limit`.

    Returns:
        For each metric with one number per document, under `TASK, METRIC` (`TASK, FILTER, METRIC`
        for a task with filters): these numbers by document. Nothing in processes other than the
        main one.

    Raises:
        UserError: a task or folder does not exist.
    """
    evaluate: Any = simple_evaluate
    with _explained(), task_resources(datasets):
        manager, names = find_tasks(tasks, include_path, metadata)
        results = evaluate(
            model=model,
            tasks=names,
            log_samples=True,
            task_manager=manager,
            metadata=metadata,
            bootstrap_iters=0,
            **options,
        )
    found: dict[str, dict[str, float]] = {}
    for task, samples in (results or {"samples": {}})["samples"].items():
        for sample in samples:
            which = [task] if sample["filter"] == "none" else [task, sample["filter"]]
            for metric in sample["metrics"]:
                value = sample[metric]
                # RULER gives −1 under the lengths that are not that of the document.
                other_length = metric.isdecimal() and value == -1
                if isinstance(value, (bool, int, float)) and not other_length:
                    column = found.setdefault(", ".join([*which, metric]), {})
                    column[str(sample["doc_id"])] = float(value)
    return found


def find_tasks(
    requested: Sequence[str], include_path: str | None, metadata: dict[str, Any] | None
) -> tuple[TaskManager, list[str]]:
    """Return a task manager that knows the requested tasks, and the names or files of the tasks.

    Listing the fourteen thousand tasks that come with lm-eval takes long, so this is done only if
    one of them is requested.

    Raises:
        UserError: a task or folder does not exist.
    """
    if include_path is not None and not Path(include_path).is_dir():
        raise UserError(f"no folder {include_path} for include_path: give one with task files")
    folders: list[str | Path] = [bundled("eval/tasks"), *filter(None, [include_path])]
    names = [name for task in requested for name in str(task).split(",") if name]
    if not names:
        raise UserError(NO_TASK)
    files = [name for name in names if name.endswith(".yaml") and Path(name).is_file()]
    manager = TaskManager(include_path=folders, include_defaults=False, metadata=metadata)
    unknown = [name for name in names if name not in files and not manager.match_tasks([name])]
    if any(not name.startswith("longrnn_") for name in unknown):
        print("looking through the tasks that come with lm-eval …", file=sys.stderr)
        manager = TaskManager(include_path=folders, metadata=metadata)
    found: dict[str, None] = {}
    for name in names:
        matches = [str(Path(name).absolute())] if name in files else manager.match_tasks([name])
        if not matches:
            close = nearest(name, manager.all_tasks)
            remedy = close if close.startswith("did") else "`lm-eval ls tasks` lists them"
            raise UserError(f"no task {name!r}: {remedy}")
        found |= dict.fromkeys(matches)
    return manager, list(found)


class Tracker(loggers.EvaluationTracker):
    """Writes results as lm-eval does, and prints how many tokens were computed."""

    def save_results_aggregated(
        self, results: dict[str, Any], samples: dict[str, Any] | None = None
    ) -> None:
        super().save_results_aggregated(results=results, samples=samples)  # type: ignore[arg-type]
        config = results["config"]
        print(
            f"Sharing prefixes, {config['tokens_computed']:,} tokens were computed, with "
            "those that were generated; request by request the prompts and choices have "
            f"{config['tokens_requested']:,}."
        )


@contextmanager
def _own_tasks(trust_task_code: bool) -> Iterator[None]:
    """Let lm-eval's command find the bundled tasks, and refuse code that is not trusted."""

    def process_tasks(self: Any, metadata: dict[str, Any] | None = None) -> TaskManager:
        self.metadata = metadata or self.metadata
        requested = self.tasks if isinstance(self.tasks, list) else [str(self.tasks)]
        if not trust_task_code:
            refuse_task_code(task_code(requested, self.include_path))
        manager, self.tasks = find_tasks(requested, self.include_path, self.metadata)
        return manager

    with (
        patch.object(EvaluatorConfig, "process_tasks", process_tasks),
        patch.object(loggers, "EvaluationTracker", Tracker),
    ):
        yield


@contextmanager
def _explained() -> Iterator[None]:
    """Turn errors of tasks into sentences, and leave out warnings that are of no use.

    A task's template, file or function can raise any error.
    """
    for name in ("lm_eval.api.task", "lm_eval.evaluator_utils"):
        logging.getLogger(name).addFilter(_useful)  # the logger ignores a filter that it has
    try:
        yield
    except (UserError, RuntimeError, MemoryError):
        raise
    except Exception as error:
        network = isinstance(error, ConnectionError)
        full_disk = isinstance(error, OSError) and not network | isinstance(
            error, FileNotFoundError
        )
        if full_disk or LOG_LEVEL in os.environ:
            raise
        remedy = f"correct the task or the options, or set {LOG_LEVEL}=DEBUG to see where"
        if network:
            remedy = (
                "connect to the network, or give --datasets FOLDER with FOLDER/ORGANISATION/NAME "
                "for the data set"
            )
        elif isinstance(error, ImportError):
            remedy = (
                "install that package (for the tasks that come with lm-eval, "
                "pip install 'lm-eval[ruler,longbench]')"
            )
        raise UserError(
            f"lm-eval stopped ({type(error).__name__}: {one_line(error)}): {remedy}"
        ) from error


def _useful(record: logging.LogRecord) -> bool:
    return not any(hint in record.getMessage() for hint in HINTS)


def _parse(arguments: Sequence[str]) -> Namespace:
    """Parse arguments with lm-eval's own parser, which reads `sys.argv`."""
    output, before = io.StringIO(), sys.argv
    sys.argv = ["lm-eval", "run", *arguments]
    try:
        with redirect_stderr(output):
            return HarnessCLI().parse_args()
    except SystemExit as leaving:
        if not leaving.code:
            raise
        reason = output.getvalue().rpartition("error: ")[2].strip()
        raise UserError(f"{reason}: `lm-eval run --help` lists the options") from leaving
    finally:
        sys.argv = before
