"""Hypothesis profiles, and where kernels run.

The default profile uses the same examples in every run; `--hypothesis-profile=explore` draws new
ones.

On a machine without a GPU the Triton kernels run in Triton's interpreter.
"""

from __future__ import annotations

import os

import pytest
import torch
from hypothesis import settings

from longrnn.ops import triton as kernels
from tests import interpreter

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before anything imports triton

settings.register_profile("repeatable", deadline=None, derandomize=True, database=None)
settings.register_profile("explore", deadline=None, max_examples=200)
settings.load_profile("repeatable")


@pytest.hookimpl(tryfirst=True)  # before `-m` selects
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks tests of kernels that run on a GPU here, and skips tests marked `cuda` without one."""
    for item in items:
        if getattr(getattr(item, "module", None), "DEVICE", None) == "cuda":
            item.add_marker(pytest.mark.cuda)
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("cuda") is not None:
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Makes Triton's interpreter faster for tests of the kernels."""
    if (
        ("triton" in item.nodeid or "gpu" in item.nodeid)
        and kernels.available()
        and kernels.interpreting()
    ):
        interpreter.speed_up()
