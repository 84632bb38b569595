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

from lm_eval import simple_evaluate
from lm_eval.__main__ import HarnessCLI
from lm_eval.config.evaluate_config import EvaluatorConfig
from lm_eval.loggers import EvaluationTracker
from lm_eval.tasks import TaskManager
from lm_eval.utils import handle_non_serializable, make_table, setup_logging

from longrnn import processes
from longrnn.bundled import bundled
from longrnn.errors import UserError, nearest
from longrnn.evaluation.harness.lm import LongRNN
from longrnn.evaluation.harness.resources import task_resources
from longrnn.evaluation.task_code import refuse_task_code, task_code
from longrnn.registry import keyword_options

# Warnings that lm-eval logs for each of our tasks although nothing is wrong.
HINTS = ("Custom kwargs can be passed", "No aggregation function defined")
NO_TASK = "name what to measure: --tasks longrnn_passkey, for example"
# Options of lm-eval that are not supported here, and the reason or replacement.
SENT = "the results are written to --output_path"
ELSEWHERE = {
    "model": "the model type is always longrnn",
    "trust_remote_code": "no remote code is run",
    "wandb_args": SENT,
    "wandb_config_args": SENT,
    "trackio_args": SENT,
    "hf_hub_log_args": SENT,
}


def run(
    checkpoint: str,
    arguments: Sequence[str],
    options: dict[str, Any],
    *,
    datasets: str | Path | None = None,
    trust_task_code: bool = False,
) -> None:
    """Evaluate a checkpoint with the options of `lm-eval run`, and print lm-eval's table.

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
    parsed = _parse(arguments)
    config = _config(parsed, {"pretrained": checkpoint, **options})
    requested = config.tasks if isinstance(config.tasks, list) else [str(config.tasks)]
    if not trust_task_code:
        refuse_task_code(task_code(requested, config.include_path))
    manager, tasks = find_tasks(requested, config.include_path, config.metadata)
    tracker = EvaluationTracker(output_path=config.output_path)
    try:
        with task_resources(datasets):
            results = _evaluate(config, manager, tasks, tracker)
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
        if config.use_cache:
            raise
        raise KeyboardInterrupt(
            "nothing was kept: give --use_cache FILE, and the same command resumes where it stopped"
        ) from error
    if not processes.is_main():
        return
    samples = results.pop("samples", None)
    tracker.save_results_aggregated(results=results, samples=samples)
    for task in samples or {}:
        tracker.save_results_samples(task_name=task, samples=samples[task])
    if config.show_config:
        print(json.dumps(results, indent=2, default=handle_non_serializable, ensure_ascii=False))
    print(make_table(results))
    if "groups" in results:
        print(make_table(results, "groups"))
    _print_cost(results["config"])


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


def _evaluate(
    config: EvaluatorConfig, manager: TaskManager, tasks: list[str], tracker: EvaluationTracker
) -> dict[str, Any]:
    """Return the results of lm-eval, called as its own command calls it."""
    seeds: Any = config.seed or [None] * 4
    caching = config.cache_requests or {}
    evaluate: Any = simple_evaluate  # its decorator hides its parameters
    results = evaluate(
        model="longrnn",
        model_args=config.model_args,
        tasks=list(tasks),
        num_fewshot=config.num_fewshot,
        batch_size=config.batch_size,
        use_cache=config.use_cache,
        cache_requests=caching.get("cache_requests", False),
        rewrite_requests_cache=caching.get("rewrite_requests_cache", False),
        delete_requests_cache=caching.get("delete_requests_cache", False),
        limit=config.limit,
        samples=config.samples,
        check_integrity=config.check_integrity,
        write_out=config.write_out,
        log_samples=config.log_samples,
        evaluation_tracker=tracker,
        system_instruction=config.system_instruction,
        apply_chat_template=config.apply_chat_template,
        fewshot_as_multiturn=bool(config.fewshot_as_multiturn),
        gen_kwargs=config.gen_kwargs,
        task_manager=manager,
        predict_only=config.predict_only,
        random_seed=seeds[0],
        numpy_random_seed=seeds[1],
        torch_random_seed=seeds[2],
        fewshot_random_seed=seeds[3],
        confirm_run_unsafe_code=config.confirm_run_unsafe_code,
        metadata=config.metadata,
    )
    return dict(results or {})


def _parse(arguments: Sequence[str]) -> Namespace:
    """Parse arguments with lm-eval's own parser."""
    if not arguments:  # lm-eval would print its help
        raise UserError(NO_TASK)
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


def _config(parsed: Namespace, model_args: dict[str, Any]) -> EvaluatorConfig:
    """Return lm-eval's configuration; its errors become UserErrors."""
    for name in ELSEWHERE:
        if getattr(parsed, name, None):
            raise UserError(f"--{name} is not supported here: leave it out, {ELSEWHERE[name]}")
    if parsed.config is None and not hasattr(parsed, "batch_size"):
        parsed.batch_size = "auto"
    parsed.model = "longrnn"
    parsed.model_args = {**model_args, **(parsed.model_args or {})}
    known = keyword_options(LongRNN)
    for name in parsed.model_args:
        if name != "pretrained" and name not in known:
            raise UserError(f"longrnn has no model argument {name!r}: {nearest(name, known)}")
    try:
        config = EvaluatorConfig.from_cli(parsed)
    except (ValueError, TypeError, FileNotFoundError) as error:
        raise UserError(f"{str(error).rstrip('.')}: see `lm-eval run --help`") from error
    if config.include_path is not None and not Path(config.include_path).is_dir():
        raise UserError(
            f"no folder {config.include_path} for --include_path: give one with task files"
        )
    return config


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
