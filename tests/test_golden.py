"""Models, training and evaluation give the numbers recorded in `tests/data/golden.json`."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from tests.golden.cases import EVALUATIONS, EXACT, MODELS, TRAINING, results
from tests.golden.results import (
    LENGTHS,
    RECORD,
    Numbers,
    one_call,
    random_pieces,
    token_by_token,
)
from tests.golden.today import BACKENDS

pytestmark = pytest.mark.core

RECORDED: dict[str, dict[str, list[Any]]] = json.loads(RECORD.read_text())
TOLERANCE = {torch.float64: 1e-7, torch.float32: 1e-5}
FLOAT32, FLOAT64 = torch.float32, torch.float64


def assert_recorded(found: Numbers, name: str, dtype: torch.dtype) -> None:
    """Numbers are those recorded, relative to the largest of those recorded together."""
    assert found, name
    assert found.keys() <= RECORDED[name].keys()
    for key, values in found.items():
        expected = torch.tensor(RECORDED[name][key], dtype=torch.float64)
        actual = torch.tensor(values, dtype=torch.float64)
        assert actual.shape == expected.shape, key
        error, scale = (actual - expected).abs().max(), expected.abs().max()
        assert error <= TOLERANCE[dtype] * scale, f"{name}, {key}: {error / scale:.1e} away"


def test_the_record_has_all_cases() -> None:
    """Every recorded result belongs to a case, and every case is recorded."""
    assert list(RECORDED) == [*MODELS, *TRAINING, *EXACT, *EVALUATIONS]


@pytest.mark.parametrize("dtype", TOLERANCE, ids=["float64", "float32"])
@pytest.mark.parametrize("name", MODELS)
def test_one_call(name: str, dtype: torch.dtype) -> None:
    """Logits, losses, final states and gradients of texts that are read in one call."""
    assert_recorded(results(MODELS[name], dtype=dtype), name, dtype)


@pytest.mark.parametrize("name", MODELS)
def test_splits(name: str) -> None:
    """The same of texts that are read in pieces, or one token at a time."""
    assert_recorded(results(MODELS[name], random_pieces, dtype=FLOAT32), name, FLOAT32)
    short = {"lengths": LENGTHS[1:2], "with_gradients": False}
    assert_recorded(results(MODELS[name], token_by_token, dtype=FLOAT32, **short), name, FLOAT32)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", TOLERANCE, ids=["float64", "float32"])
@pytest.mark.parametrize("name", MODELS)
def test_long_splits(name: str, dtype: torch.dtype) -> None:
    """The same at all lengths and in float64, with gradients."""
    for split in (random_pieces, token_by_token):
        assert_recorded(results(MODELS[name], split, dtype=dtype), name, dtype)


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", [name for name, case in MODELS.items() if case.scans])
def test_backends(name: str, backend: str) -> None:
    """Every implementation of Mamba-2's recurrence, at every split."""
    for split in (one_call, random_pieces, token_by_token):
        assert_recorded(results(MODELS[name], split, dtype=FLOAT32, backend=backend), name, FLOAT32)


@pytest.mark.parametrize("name", TRAINING)
def test_training(name: str) -> None:
    """The losses of 20 steps."""
    assert_recorded(TRAINING[name](), name, FLOAT64 if name.startswith("steps") else FLOAT32)


@pytest.mark.parametrize("name", EXACT)
def test_texts(name: str) -> None:
    """Generated texts, and answers to passkey prompts."""
    assert EXACT[name]() == RECORDED[name]


@pytest.mark.parametrize("name", EVALUATIONS)
def test_evaluations(name: str) -> None:
    """Losses by position."""
    assert_recorded(EVALUATIONS[name](), name, FLOAT32)
