"""The command line of lm-eval with the model type `longrnn` and the task in `eval/tasks`."""

from __future__ import annotations

import sys
from argparse import ArgumentParser
from collections.abc import Sequence
from pathlib import Path
from traceback import extract_tb
from typing import Any, NoReturn
from unittest.mock import patch

from lm_eval import tasks
from lm_eval.__main__ import HarnessCLI

from longrnn.bundled import bundled
from longrnn.errors import UserError
from longrnn.files import one_line
from longrnn.hf.tokenizer import own_tokenizers
from longrnn.yaml import read_mapping


def run(arguments: Sequence[str]) -> None:
    """Run `lm-eval run`; lm-eval parses its arguments, measures, writes and prints.

    Args:
        arguments: command line arguments of `lm-eval run`.

    Raises:
        UserError: an unknown option or task, or a task that fails: its template, file or function
            can raise any error.
    """
    with (
        patch.object(sys, "argv", ["lm-eval", "run", *arguments]),
        patch.object(ArgumentParser, "error", _refuse),
    ):
        parsed = HarnessCLI().parse_args()
    manager = _task_manager([name for name in parsed.tasks or [] if not name.endswith(".yaml")])
    try:
        with own_tokenizers(), patch.object(tasks, "TaskManager", manager):
            parsed.func(parsed)
    except Exception as error:
        # Such as a full disk.
        is_of_the_machine = isinstance(error, OSError) and error.errno is not None
        if is_of_the_machine or isinstance(error, UserError | RuntimeError | MemoryError):
            raise
        place = Path(extract_tb(error.__traceback__)[-1].filename)
        what = f"{type(error).__name__} in {place.parent.name}/{place.name}: {one_line(error)}"
        remedy = "correct the task or the options, or install the package or data set it needs"
        if (
            place.parent.name == "ruler"
        ):  # of lm-eval, whose shortest prompt depends on the tokenizer
            remedy = (
                "give greater max_seq_lengths in --metadata, as no word fits into these prompts"
            )
        raise UserError(
            f"lm-eval stopped ({what}): {remedy}; --use_cache FILE keeps the answers to all tasks, "
            "and LONGRNN_DEBUG=1 shows where it stopped"
        ) from error


def _task_manager(names: Sequence[str]) -> Any:
    """Return a constructor of lm-eval's task manager that also finds our task.

    Listing the fourteen thousand tasks that come with lm-eval takes seconds, so this is done only
    if one of `names` is not found without them.
    """
    constructor: Any = tasks.TaskManager

    def build(include_path: str | None, metadata: dict[str, Any]) -> Any:
        folder = bundled("eval/tasks")
        options = {"include_path": [folder, *filter(None, [include_path])], "metadata": metadata}
        manager = constructor(**options, include_defaults=False)
        if not names or not all(manager.match_tasks([name]) for name in names):
            manager = constructor(**options)
        # Its YAML file cannot know where its data is.
        passkey = manager.task_index["longrnn_passkey"]
        passkey.cfg = read_mapping(passkey.yaml_path, "install longrnn again")
        passkey.cfg["dataset_kwargs"] = {"data_files": {"test": str(folder / "passkey.jsonl")}}
        passkey.yaml_path = None
        return manager

    return build


def _refuse(parser: ArgumentParser, message: str) -> NoReturn:
    raise UserError(f"{message}: `lm-eval run --help` lists the options")
