"""Gives lm-eval's tasks their data sets from local folders, and the tokenizer of the checkpoint.

Notable choices:
- Tasks load both themselves, with names that are fixed in their files. The functions that they call
  are replaced while an evaluation runs, and restored after it. So is the one that runs git, which
  prints an error outside of a repository.
- No remote code is run: lm-eval's long-context tasks ask for it when they load a tokenizer.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

from lm_eval import evaluator
from lm_eval.api import task as lm_eval_task
from lm_eval.loggers.utils import get_commit_from_path

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
    load = datasets.load_dataset

    def load_dataset(path: str, *arguments: Any, **options: Any) -> Any:
        if folder is not None and (Path(folder) / path).is_dir():
            path = str(Path(folder) / path)
        if isinstance(options.get("features"), Mapping):
            options["features"] = features_of(options["features"])
        return load(path, *arguments, **options)

    commit = partial(get_commit_from_path, Path.cwd())
    with (
        patch.object(datasets, "load_dataset", load_dataset),
        patch.object(evaluator, "get_git_commit_hash", commit),
        own_tokenizers(),
    ):
        yield


def features_of(described: Mapping[str, Any]) -> Any:
    """Return the features that a task file describes as `{name: {dtype: …, sequence: true}}`.

    The `infinitebench` tasks of lm-eval 0.4.13 describe them so, which `datasets` 5 refuses.
    """
    datasets: Any = lm_eval_task.datasets

    def feature(spec: Any) -> Any:
        if not isinstance(spec, Mapping) or not set(spec) <= {"dtype", "sequence"}:
            return spec
        value = datasets.Value(spec["dtype"])
        return datasets.List(value) if spec.get("sequence") else value

    return datasets.Features({name: feature(spec) for name, spec in described.items()})
