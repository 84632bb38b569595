"""Embedded checkpoints give the numbers recorded in `tests/data/golden.json`."""

import json
from typing import Any

import pytest
import torch

from tests.contracts.builders import assert_near
from tests.golden import CASES, RECORD

pytestmark = pytest.mark.core

RECORDED: dict[str, dict[str, list[Any]]] = json.loads(RECORD.read_text())


def test_the_record_has_all_cases() -> None:
    assert list(RECORDED) == list(CASES)


@pytest.mark.parametrize("name", CASES)
def test_checkpoints(name: str) -> None:
    """Logits and final states of texts in float64, and losses, which are rounded to float32."""
    found = CASES[name]()
    assert found.keys() == RECORDED[name].keys()
    for key, values in found.items():
        actual, expected = (torch.tensor(one) for one in (values, RECORDED[name][key]))
        assert_near(actual.double(), expected.double(), 1e-6, key)
