"""The command line of lm-eval with the model type `longrnn` and the tasks in `eval/tasks`."""

from __future__ import annotations

import io
import sys
from argparse import Namespace
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stderr
from pathlib import Path
from typing import Any
from unittest.mock import patch

from lm_eval.__main__ import HarnessCLI
from lm_eval.config.evaluate_config import EvaluatorConfig
from lm_eval.tasks import TaskManager

from longrnn.bundled import bundled
from longrnn.errors import UserError
from longrnn.evaluation.task_code import refuse_task_code, task_code
from longrnn.files import one_line
from longrnn.hf.tokenizer import own_tokenizers


def run(arguments: Sequence[str], *, trust_task_code: bool = False) -> None:
    """Run `lm-eval run`; lm-eval parses its arguments, measures, writes and prints.

    Args:
        arguments: command line arguments of `lm-eval run`.
        trust_task_code: whether to run Python code in task files of the user.

    Raises:
        UserError: an unknown option, task or folder, or code that is not trusted.
    """

    def process_tasks(config: Any, metadata: object = None) -> TaskManager:
        """Find our tasks, too, and refuse code that is not trusted."""
        tasks = config.tasks if isinstance(config.tasks, list) else [config.tasks]
        if not trust_task_code:
            refuse_task_code(task_code(tasks, config.include_path))
        manager, config.tasks = find_tasks(tasks, config.include_path, config.metadata)
        return manager

    parsed = _parse(arguments)
    with explained(), patch.object(EvaluatorConfig, "process_tasks", process_tasks):
        parsed.func(parsed)


def find_tasks(
    requested: Sequence[str], include_path: str | None, metadata: dict[str, Any] | None
) -> tuple[TaskManager, list[str]]:
    """Return a task manager that knows the requested tasks, and the names or files of the tasks.

    Listing the fourteen thousand tasks that come with lm-eval takes long, so this is done only if
    one of them is requested.

    Raises:
        UserError: a task does not exist.
    """
    folders: list[str | Path] = [bundled("eval/tasks"), *filter(None, [include_path])]
    names = [name for task in requested for name in task.split(",")]
    for defaults in (False, True):
        manager = TaskManager(
            include_path=folders, include_defaults=defaults, metadata=metadata or {}
        )
        found = {name: manager.match_tasks([name]) for name in names}
        files = [name for name in names if name.endswith(".yaml") and Path(name).is_file()]
        found |= {name: [str(Path(name).absolute())] for name in files}
        missing = [name for name, matches in found.items() if not matches]
        if not missing:
            return manager, [match for matches in found.values() for match in matches]
    raise UserError(
        f"no task {missing[0]!r}: give longrnn_passkey, or one that `lm-eval ls tasks` lists"
    )


@contextmanager
def explained() -> Iterator[None]:
    """Give tasks the tokenizers of checkpoints, and turn their errors into sentences.

    A task's template, file or function can raise any error.
    """
    try:
        with own_tokenizers():
            yield
    except (UserError, RuntimeError, MemoryError):
        raise
    except Exception as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise  # such as a full disk
        raise UserError(
            f"lm-eval stopped ({type(error).__name__}: {one_line(error)}): correct the task or the "
            "options, install the package or get the data set that is missing, or set "
            "LONGRNN_DEBUG=1 to see where"
        ) from error


def _parse(arguments: Sequence[str]) -> Namespace:
    """Parse arguments with lm-eval's own parser, which reads `sys.argv`."""
    output = io.StringIO()
    try:
        with patch.object(sys, "argv", ["lm-eval", "run", *arguments]), redirect_stderr(output):
            return HarnessCLI().parse_args()
    except SystemExit as leaving:
        if not leaving.code:
            raise
        reason = output.getvalue().rpartition("error: ")[2].strip()
        raise UserError(f"{reason}: `lm-eval run --help` lists the options") from leaving
