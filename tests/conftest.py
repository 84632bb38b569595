"""Hypothesis profiles, where kernels run, and where pictures are drawn.

The default profile uses the same examples in every run; `--hypothesis-profile=explore` draws new
ones.
"""

import gc
import os
from collections.abc import Iterator
from tempfile import TemporaryDirectory
from typing import IO, Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import settings
from matplotlib.figure import Figure
from torch.utils import collect_env

settings.register_profile("repeatable", deadline=None, derandomize=True, database=None)
settings.register_profile("explore", deadline=None, max_examples=200)
settings.load_profile("repeatable")

# As in the processes that tests start: runs are compared bit for bit.
torch.set_num_threads(1)
# lm-eval adds it to every result; it starts a dozen programs, of which pip alone takes a second.
collect_env.get_pretty_env_info = str

# The corpora that runs make, until the end of this process.
CACHE = TemporaryDirectory(prefix="longrnn-")
os.environ["LONGRNN_CACHE"] = CACHE.name

DRAW = Figure.savefig


def not_drawn(figure: Figure, file: IO[bytes], **options: Any) -> None:
    file.write(b"\x89PNG")


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Pictures, most of the time of a short command, are drawn where a marker says so."""
    is_drawn = item.get_closest_marker("pictures") is not None
    Figure.savefig = DRAW if is_drawn else not_drawn  # type: ignore[method-assign, assignment]


@pytest.fixture(autouse=True)
def environment() -> Iterator[None]:
    """Every test ends with the variables of the environment that it began with."""
    with patch.dict(os.environ):
        yield


def pytest_collection_finish() -> None:
    """Keeps modules and tests, which live until the end, from the garbage collector."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(tryfirst=True)  # before `-m` selects
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skips tests marked `cuda` without a GPU."""
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("cuda") is not None:
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))
