"""The command line of lm-eval with the model type `longrnn` and the task in `eval/tasks`."""

import subprocess
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from tempfile import TemporaryFile
from traceback import extract_tb
from typing import Any, NoReturn
from unittest.mock import patch

from lm_eval import tasks
from lm_eval.__main__ import HarnessCLI

from longrnn.bundled import bundled
from longrnn.checkpoints.tokenizer import own_tokenizers
from longrnn.errors import UserError
from longrnn.evaluation.harness.local_data import read_from, refuse_missing
from longrnn.files import one_line
from longrnn.yaml import read_mapping

# Folders of lm-eval's tasks.
LONG_CONTEXT = ("ruler", "babilong", "longbench")


def run(arguments: Sequence[str], data: Path | None = None) -> None:
    """Run `lm-eval run`; lm-eval parses its arguments, measures, writes and prints.

    Args:
        arguments: command line arguments of `lm-eval run`.
        data: a folder with data sets of tasks, see `local_data`.

    Raises:
        UserError: an unknown option or task, missing data, or a task that fails.
        OSError: nothing can be written to --output_path.
    """
    parsed = parse(arguments)
    if not (parsed.tasks or parsed.config):
        raise UserError("no tasks are named: give --tasks NAMES; `lm-eval ls tasks` lists them")
    if parsed.output_path is not None:  # lm-eval only logs, at the end, that it cannot write there
        place = Path(parsed.output_path)
        folder = place.parent if place.suffix == ".json" else place
        folder.mkdir(parents=True, exist_ok=True)
        TemporaryFile(dir=folder).close()
    if data is not None:
        refuse_missing(data, parsed.tasks or [])
    manager = task_manager([name for name in parsed.tasks or [] if not name.endswith(".yaml")])
    quiet = partial(subprocess.check_output, stderr=subprocess.DEVNULL)  # git, where there is none
    with (
        prepared(data),
        patch.object(tasks, "TaskManager", manager),
        patch.object(subprocess, "check_output", quiet),
    ):
        parsed.func(parsed)


def parse(arguments: Sequence[str]) -> Namespace:
    """Return the arguments of `lm-eval run`.

    Raises:
        UserError: an unknown option, one without its value, or a value that is not valid.
    """
    with (
        patch.object(sys, "argv", ["lm-eval", "run", *arguments]),
        patch.object(ArgumentParser, "error", _refuse),
    ):
        parsed = HarnessCLI().parse_args()
    if parsed.limit is not None and not parsed.limit > 0:
        raise UserError(f"--limit {parsed.limit:g} is not above 0: give a number of documents")
    if parsed.num_fewshot is not None and parsed.num_fewshot < 0:
        raise UserError(f"--num_fewshot {parsed.num_fewshot} is below 0: give 0 or more examples")
    if parsed.include_path is not None and not Path(parsed.include_path).is_dir():
        raise UserError(f"--include_path {parsed.include_path} is not a folder: give one of tasks")
    if parsed.model not in (None, "longrnn"):
        raise UserError(
            f"--model {parsed.model} is not possible here, where any checkpoint that longrnn loads "
            "is evaluated: leave it out, or run `lm-eval run`"
        )
    return parsed


@contextmanager
def prepared(data: Path | None) -> Iterator[None]:
    """Let lm-eval use our tokenizers and data sets in a folder, and explain its errors."""
    with explained(), own_tokenizers(), read_from(data):
        yield


@contextmanager
def explained() -> Iterator[None]:
    """Raise what lm-eval raises as a UserError: a template, file or function can raise any error.

    Errors of the machine, such as a full disk, stay as they are.
    """
    try:
        yield
    except Exception as error:
        is_of_the_machine = isinstance(error, OSError) and error.errno is not None
        if is_of_the_machine or isinstance(error, UserError | RuntimeError | MemoryError):
            raise
        place = Path(extract_tb(error.__traceback__)[-1].filename)
        what = f"{type(error).__name__} in {place.parent.name}/{place.name}: {one_line(error)}"
        remedy = "correct the task or the options, or install the package or data set it needs"
        if place.parent.name == "ruler":
            # Its shortest prompt depends on the tokenizer.
            remedy = (
                "give greater max_seq_lengths in --metadata, or --lengths, which keeps the results "
                "of the other tasks"
            )
        raise UserError(
            f"lm-eval stopped ({what}): {remedy}; --use_cache FILE keeps the answers to all tasks, "
            "and LONGRNN_DEBUG=1 shows where it stopped"
        ) from error


def task_manager(names: Sequence[str]) -> Any:
    """Return a constructor of lm-eval's task manager that also finds our task.

    Listing the fourteen thousand tasks that come with lm-eval takes seconds, so this is done only
    if one of `names` is not found among those with long contexts.
    """
    constructor: Any = tasks.TaskManager
    long_context = [Path(tasks.__file__).parent / name for name in LONG_CONTEXT]

    def build(include_path: str | None, metadata: dict[str, Any]) -> Any:
        folder = bundled("eval/tasks")
        paths = [folder, *filter(None, [include_path])]
        manager = constructor(
            include_path=[*long_context, *paths], metadata=metadata, include_defaults=False
        )
        if not names or not all(manager.match_tasks([name]) for name in names):
            manager = constructor(include_path=paths, metadata=metadata)
        # Its YAML file cannot know where its data is.
        passkey = manager.task_index["longrnn_passkey"]
        passkey.cfg = read_mapping(passkey.yaml_path, "install longrnn again")
        passkey.cfg["dataset_kwargs"] = {"data_files": {"test": str(folder / "passkey.jsonl")}}
        passkey.yaml_path = None
        return manager

    return build


def _refuse(parser: ArgumentParser, message: str) -> NoReturn:
    raise UserError(f"{message}: `lm-eval run --help` lists the options")
