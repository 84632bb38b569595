"""Each test begins with accelerate's process-wide state unset."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from accelerate.state import AcceleratorState, GradientState


@pytest.fixture(autouse=True)
def fresh_accelerate() -> Iterator[None]:
    _reset()  # a test of another folder may have trained in this process
    yield
    _reset()


def _reset() -> None:
    AcceleratorState._reset_state(True)
    GradientState._reset_state()
