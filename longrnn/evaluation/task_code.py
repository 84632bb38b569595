"""Which lm-eval tasks of a user can run Python code, and the question that comes before it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from longrnn.errors import UserError


def task_code(tasks: Sequence[str], include_path: str | None) -> list[str]:
    """Return the files and folders of tasks that are neither bundled nor part of lm-eval.

    Args:
        tasks: names and files of tasks; one text may hold several, divided by commas.
        include_path: a folder with further tasks.
    """
    names = [name for task in tasks for name in str(task).split(",")]
    files = [name for name in names if name.endswith((".yaml", ".yml")) or "/" in name]
    return [*files, *([] if include_path is None else [include_path])]


def refuse_task_code(paths: Iterable[str]) -> None:
    """Refuse to run code that the user has not allowed.

    Raises:
        UserError: there are paths.
    """
    if given := list(dict.fromkeys(paths)):
        raise UserError(
            f"task files can run any Python code ({', '.join(given)}): read them, then give "
            "--trust-task-code"
        )
