"""Hypothesis profiles, and where kernels run.

The default profile uses the same examples in every run; `--hypothesis-profile=explore` draws new
ones.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import settings

settings.register_profile("repeatable", deadline=None, derandomize=True, database=None)
settings.register_profile("explore", deadline=None, max_examples=200)
settings.load_profile("repeatable")

# As in the processes that tests start: runs are compared bit for bit.
torch.set_num_threads(1)


@pytest.hookimpl(tryfirst=True)  # before `-m` selects
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skips tests marked `cuda` without a GPU."""
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("cuda") is not None:
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))
