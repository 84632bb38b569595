"""The command line of lm-eval with the model type `longrnn` and the tasks in `eval/tasks`."""

from __future__ import annotations

import io
import json
import logging
import os
import sys
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr
from pathlib import Path
from typing import Any

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

# Warnings that lm-eval logs for each of our tasks although nothing is wrong.
HINTS = ("Custom kwargs can be passed", "No aggregation function defined")
NO_TASK = "name what to measure: --tasks longrnn_passkey, for example"


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
    if "LMEVAL_LOG_LEVEL" in os.environ:
        setup_logging()
    _without_hints()
    given = {"pretrained": checkpoint, **options}
    device = ["--device", str(given.pop("device"))] if "device" in given else []
    ours = ["--batch_size", "auto", "--model_args", json.dumps(given), *device]
    parsed = _parse([*ours, *arguments, "--model", "longrnn"])
    if not parsed.tasks and not parsed.config:
        raise UserError(NO_TASK)
    try:
        with task_resources(datasets), _own_tasks(trust_task_code):
            parsed.func(parsed)
    except ConnectionError as error:
        raise UserError(
            f"the data of a task cannot be downloaded ({error}): connect to the network, or give "
            "--datasets FOLDER with FOLDER/ORGANISATION/NAME for the data set"
        ) from error
    except (UserError, RuntimeError, MemoryError):
        raise
    except ImportError as error:
        raise UserError(missing_package(error)) from error
    except Exception as error:  # a task's template, file or function can raise any error
        unexpected = not isinstance(error, FileNotFoundError) and isinstance(error, OSError)
        if unexpected or "LMEVAL_LOG_LEVEL" in os.environ:
            raise
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise UserError(
            f"lm-eval stopped ({reason}): correct the task or the options, or set "
            "LMEVAL_LOG_LEVEL=DEBUG to see where"
        ) from error
    except KeyboardInterrupt as error:
        if parsed.use_cache:
            raise
        raise KeyboardInterrupt(
            "nothing was kept: give --use_cache FILE, and the same command resumes where it stopped"
        ) from error


class Tracker(loggers.EvaluationTracker):
    """Writes results as lm-eval does, and prints how many tokens were computed."""

    def save_results_aggregated(
        self, results: dict[str, Any], samples: dict[str, Any] | None = None
    ) -> None:
        super().save_results_aggregated(results=results, samples=samples)  # type: ignore[arg-type]
        _print_cost(results["config"])


@contextmanager
def _own_tasks(trust_task_code: bool) -> Iterator[None]:
    """Let lm-eval's command find the bundled tasks, and refuse code that is not trusted."""
    config: Any = EvaluatorConfig
    before = config.process_tasks, loggers.EvaluationTracker

    def process_tasks(self: Any, metadata: dict[str, Any] | None = None) -> TaskManager:
        self.metadata = metadata or self.metadata
        requested = self.tasks if isinstance(self.tasks, list) else [str(self.tasks)]
        if not trust_task_code:
            refuse_task_code(task_code(requested, self.include_path))
        manager, self.tasks = find_tasks(requested, self.include_path, self.metadata)
        return manager

    config.process_tasks, loggers.EvaluationTracker = process_tasks, Tracker  # type: ignore[misc]
    try:
        yield
    finally:
        config.process_tasks, loggers.EvaluationTracker = before  # type: ignore[misc]


def _parse(arguments: Sequence[str]) -> Namespace:
    """Parse arguments with lm-eval's own parser."""
    output = io.StringIO()
    with _arguments(["lm-eval", "run", *arguments]):
        try:
            with redirect_stderr(output):
                return HarnessCLI().parse_args()
        except SystemExit as leaving:
            if not leaving.code:
                raise
            reason = output.getvalue().rpartition("error: ")[2].strip()
            raise UserError(f"{reason}: `lm-eval run --help` lists the options") from leaving


@contextmanager
def _arguments(arguments: list[str]) -> Iterator[None]:
    """Set `sys.argv`, from which lm-eval's parser reads."""
    before, sys.argv = sys.argv, arguments
    try:
        yield
    finally:
        sys.argv = before


def _print_cost(config: Mapping[str, Any]) -> None:
    """Print how many tokens were computed, and how many the prompts have one by one."""
    requested, computed = config["tokens_requested"], config["tokens_computed"]
    if computed:  # no tokens are computed if all answers are in the cache
        # Generated tokens are computed and not requested, so with few prompts there is no saving.
        times = f", {requested / computed:.1f} × as many" if requested > computed else ""
        print(
            f"Sharing prefixes, {computed:,} tokens were computed (with those that were "
            f"generated); request by request the prompts and choices have {requested:,}{times}."
        )


def scores(
    model: LongRNN,
    tasks: Sequence[str],
    *,
    include_path: str | None = None,
    limit: int | None = None,
    num_fewshot: int | None = None,
    metadata: dict[str, Any] | None = None,
    seed: int = 0,
    datasets: str | Path | None = None,
) -> dict[str, dict[str, float]]:
    """Return the scores of a model for each document of tasks.

    Args:
        model: an lm-eval model.
        tasks: names, or YAML files.
        include_path: a folder with further tasks.
        limit: documents of each task; None for all.
        num_fewshot: examples in each prompt; None for the number in the task.
        metadata: metadata of the tasks.
        seed: seed of the examples.
        datasets: a folder with data sets, see `task_resources`.

    Returns:
        For each metric with one number per document, under `TASK, METRIC` (`TASK, FILTER, METRIC`
        for a task with filters): these numbers by document. Nothing in processes other than the
        main one.

    Raises:
        UserError: a task or folder does not exist.
    """
    _without_hints()
    manager, names = find_tasks(tasks, include_path, metadata)
    evaluate: Any = simple_evaluate
    with task_resources(datasets):
        results = evaluate(
            model=model,
            tasks=list(names),
            num_fewshot=num_fewshot,
            limit=limit,
            log_samples=True,
            task_manager=manager,
            metadata=metadata,
            fewshot_random_seed=seed,
            bootstrap_iters=0,
        )
    found: dict[str, dict[str, float]] = {}
    for task, samples in (results or {"samples": {}})["samples"].items():
        for sample in samples:
            which = [task] if sample["filter"] == "none" else [task, sample["filter"]]
            for metric in sample["metrics"]:
                value = sample[metric]
                if isinstance(value, (bool, int, float)):
                    column = found.setdefault(", ".join([*which, metric]), {})
                    column[str(sample["doc_id"])] = float(value)
    return found


def missing_package(error: ImportError) -> str:
    """Return what to install for a task that cannot import a package."""
    reason = " ".join(str(error).split())
    return (
        f"the code of a task could not import what it needs ({reason}): install that package (for "
        "the tasks that come with lm-eval, pip install 'lm-eval[ruler,longbench]')"
    )


def _useful(record: logging.LogRecord) -> bool:
    return not any(hint in record.getMessage() for hint in HINTS)


def _without_hints() -> None:
    for name in ("lm_eval.api.task", "lm_eval.evaluator_utils"):
        logging.getLogger(name).addFilter(_useful)  # the logger ignores a filter that it has


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
    folders: list[str | Path] = [bundled("eval/tasks")]
    folders += [] if include_path is None else [include_path]
    names = [name for task in requested for name in str(task).split(",") if name]
    if not names:
        raise UserError(NO_TASK)
    manager = TaskManager(include_path=folders, include_defaults=False, metadata=metadata)
    files = [name for name in names if name.endswith(".yaml") and Path(name).is_file()]
    unknown = [name for name in names if name not in files and not manager.match_tasks([name])]
    if any(not name.startswith("longrnn_") for name in unknown):
        print("looking through the tasks that come with lm-eval …", file=sys.stderr)
        manager = TaskManager(include_path=folders, metadata=metadata)
    found: list[str] = []
    for name in names:
        matches = [str(Path(name).absolute())] if name in files else manager.match_tasks([name])
        if not matches:
            close = nearest(name, manager.all_tasks)
            remedy = close if close.startswith("did") else "`lm-eval ls tasks` lists them"
            raise UserError(f"no task {name!r}: {remedy}")
        found += [match for match in matches if match not in found]
    return manager, found
