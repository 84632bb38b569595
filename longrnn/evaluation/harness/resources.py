"""Gives lm-eval's tasks their data sets from local folders, and the tokenizer of the checkpoint.

Notable choices:
- Tasks load both themselves, with names that are fixed in their files. The functions that they call
  are replaced while an evaluation runs, and restored after it. So is the one that asks git for the
  commit of the current folder, because it prints an error where there is none.
- No remote code is run: lm-eval's long-context tasks ask for it when they load a tokenizer.
"""

from __future__ import annotations

import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lm_eval import evaluator
from lm_eval.api import task as lm_eval_task

from longrnn.errors import UserError
from longrnn.hf.tokenizer import own_tokenizers


@contextmanager
def task_resources(folder: str | Path | None = None) -> Iterator[None]:
    """Replace where tasks find their data sets and tokenizers.

    Args:
        folder: `ORGANISATION/NAME` in it is read instead of the data set of that name on the Hub;
            None for the Hub alone.

    Raises:
        UserError: there is no such folder.
    """
    if folder is not None and not Path(folder).is_dir():
        raise UserError(f"no folder {folder} for --datasets: give one that has ORGANISATION/NAME")
    datasets: Any = lm_eval_task.datasets  # the module that lm-eval uses
    before = datasets.load_dataset

    def load_dataset(path: str, *arguments: Any, **options: Any) -> Any:
        local = None if folder is None else Path(folder) / path
        if local is not None and local.is_dir():
            path = str(local)
        if isinstance(options.get("features"), Mapping):
            options["features"] = features_of(options["features"])
        return before(path, *arguments, **options)

    asked: Any = evaluator.get_git_commit_hash
    datasets.load_dataset = load_dataset
    evaluator.get_git_commit_hash = commit
    try:
        with own_tokenizers():
            yield
    finally:
        datasets.load_dataset = before
        evaluator.get_git_commit_hash = asked


def commit() -> str | None:
    """Return the commit of the current folder; None where there is none, or no git."""
    try:
        command = ["git", "describe", "--always"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return None
    return done.stdout.strip() or None


def features_of(described: Mapping[str, Any]) -> Any:
    """Return the features that a task file describes as `{name: {dtype: …, sequence: true}}`.

    The `infinitebench` tasks of lm-eval 0.4.13 describe them so, which `datasets` 5 refuses.
    """
    datasets: Any = lm_eval_task.datasets
    found: dict[str, Any] = {}
    for name, spec in described.items():
        value = spec
        if isinstance(spec, Mapping) and set(spec) <= {"dtype", "sequence"}:
            value = datasets.Value(spec["dtype"])
            value = datasets.List(value) if spec.get("sequence") else value
        found[name] = value
    return datasets.Features(found)
