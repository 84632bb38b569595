"""Hypothesis profiles, and a check of the form of every `UserError` that a test raises.

The default profile uses the same examples in every run; `--hypothesis-profile=explore` draws new
ones.
"""

from __future__ import annotations

from pathlib import Path
from types import FrameType

import pytest
import torch
from hypothesis import settings

import longrnn
from longrnn.errors import UserError
from tests import messages

settings.register_profile("repeatable", deadline=None, derandomize=True, database=None)
settings.register_profile("explore", deadline=None, max_examples=200)
settings.load_profile("repeatable")

PACKAGE = Path(longrnn.__file__).parent
# Messages of wrong form that were raised since the last test ended: what, where, complaints.
_wrong: list[str] = []
_plain = UserError.__init__


def _recording(self: UserError, *parts: object) -> None:
    """`UserError.__init__`, which also checks messages that are raised inside the package."""
    _plain(self, *parts)
    import sys

    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename == __file__:
        frame = frame.f_back
    if frame is None:
        return
    path = Path(frame.f_code.co_filename)
    if not path.is_relative_to(PACKAGE):
        return
    where = path.relative_to(PACKAGE.parent).as_posix()
    found = messages.complaints(str(self))
    if found:
        _wrong.append(f"{where}:{frame.f_lineno}: {str(self)!r}: {'; '.join(found)}")


UserError.__init__ = _recording  # type: ignore[method-assign]


@pytest.hookimpl(tryfirst=True)  # before `-m` selects
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skips tests marked `cuda` without a GPU."""
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("cuda") is not None:
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> object:
    """Fails a test in which a message of the wrong form was raised, in every worker."""
    outcome = yield
    report = outcome.get_result()
    if call.when == "call" and _wrong:
        wrong, _wrong[:] = list(dict.fromkeys(_wrong)), []
        if report.passed:
            report.outcome = "failed"
            listed = "\n".join(wrong)
            report.longrepr = f"errors that do not have the form of tests/messages.py:\n{listed}"
