"""Data of lm-eval tasks that is read from a folder instead of the network.

Notable choices:
- lm-eval asks for data by the names of its owners: of data sets on the Hub, and of files at URLs.
  Within `read_from`, both are looked for in the folder first.
- RULER makes 500 samples of every length, one after another: those that are not evaluated are not
  made.
- Some of RULER's loops retry in a bare `except` and never end where a prompt does not fit. After
  MOST_ATTEMPTS at one sample, a timer raises until it does so outside of that `except`.
- Where not ten words fit, `ruler_cwe` makes samples without an answer: `with_answers` refuses this.
"""

from __future__ import annotations

import io
import random
import signal
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from fnmatch import fnmatch
from functools import wraps
from importlib import import_module
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple, NoReturn
from unittest.mock import patch

import datasets
import numpy as np
import requests

from longrnn.errors import UserError

# Modules of RULER that make prompts, and the tasks that they make them for.
RULER_MODULES = {
    "prepare_niah": "niah_*",
    "vt_utils": "ruler_vt",
    "cwe_utils": "ruler_cwe",
    "fwe_utils": "ruler_fwe",
    "qa_utils": "ruler_qa_*",
}
MOST_ATTEMPTS = 20_000
CWE_ANSWER_TOKENS = 120
HUB = "https://huggingface.co/datasets/"


class NeededData(NamedTuple):
    """Data that tasks need: its path in the folder, and where its owner offers it.

    Without a source, it is the data set of that name on the Hub.
    """

    path: str
    tasks: tuple[str, ...]
    source: str = ""


ESSAYS = ("ruler", "niah_single_[23]", "niah_multikey_1", "niah_multiquery", "niah_multivalue")
NEEDED = (
    NeededData("baber/paul_graham_essays", ESSAYS),
    NeededData(
        "nltk_data/tokenizers/punkt_tab",
        ESSAYS,
        source="https://github.com/nltk/nltk_data/tree/gh-pages/packages/tokenizers",
    ),
    NeededData(
        "dev-v2.0.json",
        ("ruler", "ruler_qa_squad"),
        source="https://rajpurkar.github.io/SQuAD-explorer/dataset/dev-v2.0.json",
    ),
    NeededData(
        "hotpot_dev_distractor_v1.json",
        ("ruler", "ruler_qa_hotpot"),
        source=f"{HUB}namlh2004/hotpotqa",
    ),
    NeededData("RMT-team/babilong-1k-samples", ("babilong*",)),
    NeededData("Xnhyacinth/LongBench", ("longbench*",)),
)


def refuse_missing(folder: Path, tasks: Sequence[str]) -> None:
    """Raise a UserError if the folder is missing, or lacks the data of a task."""
    if not folder.is_dir():
        raise UserError(f"--data {folder} is not a folder: give one with the data of the tasks")
    for needed in NEEDED:
        for task in tasks:
            path = folder / needed.path
            if any(fnmatch(task, pattern) for pattern in needed.tasks) and not path.exists():
                source = needed.source or f"{HUB}{needed.path}"
                raise UserError(f"{task} needs {path}, which does not exist: get it from {source}")


@contextmanager
def read_from(folder: Path | None) -> Iterator[None]:
    """Read data sets, files at URLs and NLTK's data from a folder where it has them."""
    if folder is None:
        yield
        return
    load, get = datasets.load_dataset, requests.get

    def load_dataset(path: str, *arguments: Any, **options: Any) -> Any:
        local = folder / path
        return load(str(local if local.exists() else path), *arguments, **options)

    def get_file(url: str, *arguments: Any, **options: Any) -> Any:
        local = folder / url.rsplit("/", 1)[-1]
        if not local.exists():
            return get(url, *arguments, **options)
        response = requests.Response()
        response.status_code, response.raw = 200, io.BytesIO(local.read_bytes())
        return response

    with ExitStack() as stack:
        stack.enter_context(patch.object(datasets, "load_dataset", load_dataset))
        stack.enter_context(patch.object(requests, "get", get_file))
        if find_spec("nltk") is not None:
            data: Any = import_module("nltk.data")
            places = [str(folder / "nltk_data"), *data.path]
            stack.enter_context(patch.object(data, "path", places))
        yield


class SampleLimit:
    """Ends RULER's loops over samples, and over attempts at one sample."""

    def __init__(self, count: int) -> None:
        self.count, self.attempts = count, 0

    def samples(self, numbers: Iterable[int], **options: Any) -> Iterator[int]:
        """Yield as many as are wanted, in the place of a progress bar."""
        for number in islice(numbers, self.count):
            self.attempts = 0
            yield number

    def counted(self, generate: Callable[..., Any]) -> Callable[..., Any]:
        """Return a generator of prompts that counts attempts."""

        @wraps(generate)
        def attempt(*arguments: Any, **options: Any) -> Any:
            self.attempts += 1
            if self.attempts > MOST_ATTEMPTS:
                signal.setitimer(signal.ITIMER_REAL, 1e-3, 1e-3)
                raise ValueError
            return generate(*arguments, **options)

        return attempt


@contextmanager
def first_samples(task: str, count: int) -> Iterator[None]:
    """Make only the first samples of a task of RULER, from the seeds of lm-eval.

    Raises:
        ValueError: no prompt fits into the length.
    """
    limit = SampleLimit(count)
    before = signal.signal(signal.SIGALRM, _refuse_to_go_on)
    with ExitStack() as stack:
        for name, tasks in RULER_MODULES.items():
            if task != "ruler" and not fnmatch(task, tasks):
                continue
            module: Any = import_module(f"lm_eval.tasks.ruler.{name}")
            # So that lm-eval does not load another copy of the module.
            module.__mtime__ = Path(module.__file__).stat().st_mtime_ns
            stack.enter_context(patch.object(module, "tqdm", limit.samples))
            counted = limit.counted(module.generate_input_output)
            stack.enter_context(patch.object(module, "generate_input_output", counted))
        random.seed(0)
        np.random.seed(1234)
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)


@contextmanager
def with_answers() -> Iterator[None]:
    """Refuse lengths at which `ruler_cwe` has no answers, and name the shortest one."""
    if find_spec("wonderwords") is None:
        yield
        return
    module: Any = import_module("lm_eval.tasks.ruler.cwe_utils")
    module.__mtime__ = Path(module.__file__).stat().st_mtime_ns
    make_samples = module.sys_word_pair_random

    def checked(num_samples: int, max_seq_length: int, tokenizer: Any) -> Any:
        states = random.getstate(), module.RNG.getstate()
        example, text, answer = module.generate_input_output(10, max_seq_length)
        random.setstate(states[0])
        module.RNG.setstate(states[1])
        answers = " ".join(f"{number}. {word}" for number, word in enumerate(answer, 1))
        shortest = len(tokenizer(f"{example}\n{text} {answers}").input_ids) + CWE_ANSWER_TOKENS
        if shortest > max_seq_length:
            raise UserError(
                f"ruler_cwe needs at least {shortest:,} tokens with this tokenizer, not "
                f"{max_seq_length:,}: give greater lengths"
            )
        return make_samples(num_samples, max_seq_length, tokenizer)

    with patch.object(module, "sys_word_pair_random", checked):
        yield


def _refuse_to_go_on(number: int, frame: Any) -> NoReturn:
    raise ValueError("no prompt fits into this length with this tokenizer")
