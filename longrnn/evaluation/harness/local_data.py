"""Data of lm-eval tasks: from a folder instead of the network, and no more of it than is needed.

Notable choices:
- lm-eval loads data sets by their names on the Hub. Within `read_from`, the folder comes first.
- RULER makes 500 samples of every length, one after another: those that are not evaluated are not
  made.
- Two of RULER's loops retry in a bare `except` and never end where no prompt fits. After
  MOST_ATTEMPTS at one sample they get an empty prompt, which does, and then a ValueError.
"""

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from fnmatch import fnmatch
from importlib import import_module
from itertools import islice
from pathlib import Path
from typing import Any
from unittest.mock import patch

import datasets
import numpy as np

from longrnn.errors import UserError

# Modules of RULER that make prompts, and the tasks that they make them for.
RULER_MODULES = {
    "prepare_niah": "niah_*",
    "vt_utils": "ruler_vt",
    "cwe_utils": "ruler_cwe",
    "fwe_utils": "ruler_fwe",
    "qa_utils": "ruler_qa_*",
}
# An empty prompt in the form of those modules whose loops may not end.
EMPTY_PROMPTS = {"vt_utils": ("", []), "cwe_utils": ("", "", [])}
MOST_ATTEMPTS = 20_000
# Data sets, by their names on the Hub and in the folder, and the tasks that need them.
NEEDED = {
    "baber/paul_graham_essays": (
        "ruler",
        "niah_single_[23]",
        "niah_multikey_1",
        "niah_multiquery",
        "niah_multivalue",
    ),
    "RMT-team/babilong-1k-samples": ("babilong*",),
    "Xnhyacinth/LongBench": ("longbench*",),
}


def refuse_missing(folder: Path, tasks: Sequence[str]) -> None:
    """Raise a UserError if the folder is missing, or lacks the data set of a task."""
    if not folder.is_dir():
        raise UserError(f"--data {folder} is not a folder: give one with the data of the tasks")
    for name, patterns in NEEDED.items():
        for task in tasks:
            if any(fnmatch(task, pattern) for pattern in patterns) and not (folder / name).exists():
                raise UserError(
                    f"{task} needs {folder / name}, which does not exist: get it from "
                    f"https://huggingface.co/datasets/{name}"
                )


@contextmanager
def read_from(folder: Path | None) -> Iterator[None]:
    """Read data sets from a folder where it has them."""
    if folder is None:
        yield
        return
    load = datasets.load_dataset

    def load_dataset(path: str, *arguments: Any, **options: Any) -> Any:
        local = folder / path
        return load(str(local if local.exists() else path), *arguments, **options)

    with patch.object(datasets, "load_dataset", load_dataset):
        yield


@contextmanager
def first_samples(task: str, count: int) -> Iterator[None]:
    """Make only the first samples of a task of RULER, from the seeds of lm-eval.

    Raises:
        ValueError: no prompt fits into the length.
    """
    attempts = 0

    def samples(numbers: Iterable[int], **options: Any) -> Iterator[int]:
        """Yield as many as are wanted, in the place of a progress bar."""
        nonlocal attempts
        for number in islice(numbers, count):
            attempts = 0
            yield number
            if attempts > MOST_ATTEMPTS:
                raise ValueError("no prompt fits into this length with this tokenizer")

    def counted(generate: Callable[..., Any], empty_prompt: Any) -> Callable[..., Any]:
        def attempt(*arguments: Any, **options: Any) -> Any:
            nonlocal attempts
            attempts += 1
            return empty_prompt if attempts > MOST_ATTEMPTS else generate(*arguments, **options)

        return attempt

    with ExitStack() as stack:
        for name, tasks in RULER_MODULES.items():
            if task != "ruler" and not fnmatch(task, tasks):
                continue
            module: Any = import_module(f"lm_eval.tasks.ruler.{name}")
            # So that lm-eval does not load another copy of the module.
            module.__mtime__ = Path(module.__file__).stat().st_mtime_ns
            stack.enter_context(patch.object(module, "tqdm", samples))
            if name in EMPTY_PROMPTS:
                generate = counted(module.generate_input_output, EMPTY_PROMPTS[name])
                stack.enter_context(patch.object(module, "generate_input_output", generate))
        random.seed(0)
        np.random.seed(1234)
        yield
