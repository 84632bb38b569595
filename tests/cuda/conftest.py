"""Tests with the fixture `device` run on a GPU where torch finds one, and always on the CPU.

The body is the same, so what the CPU passes is known to be a valid test.
"""

from __future__ import annotations

import pytest
import torch

ON_GPU = torch.cuda.is_available()


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
def device(request: pytest.FixtureRequest) -> torch.device:
    return torch.device(request.param)


@pytest.fixture(params=[pytest.param("cuda", marks=pytest.mark.cuda)] if ON_GPU else ["cpu"])
def default_device(request: pytest.FixtureRequest) -> torch.device:
    """The device that training takes by itself; accelerate cannot change it within a process."""
    return torch.device(request.param)
