"""Registers the markers of transformers' own tests, which `test_transformers_common.py` loads."""

from __future__ import annotations

import pytest

from tests.hf import transformers_source


def pytest_configure(config: pytest.Config) -> None:
    """Without this, `--strict-markers` would refuse them."""
    for name in transformers_source.markers():
        config.addinivalue_line("markers", f"{name}: a marker of transformers' own tests")
