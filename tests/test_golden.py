"""Models and evaluations give the numbers recorded in `tests/data/golden.json`."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from tests.golden import (
    CASES,
    EVALUATIONS,
    EXACT,
    MODELS,
    RECORD,
    Numbers,
    one_call,
    random_pieces,
    token_by_token,
)

pytestmark = pytest.mark.core

RECORDED: dict[str, dict[str, list[Any]]] = json.loads(RECORD.read_text())
TOLERANCE = {torch.float64: 1e-7, torch.float32: 1e-5}
FLOAT32 = torch.float32


def assert_recorded(found: Numbers, name: str, dtype: torch.dtype = FLOAT32) -> None:
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
    assert list(RECORDED) == list(CASES)


@pytest.mark.parametrize("name", MODELS)
def test_checkpoints(name: str) -> None:
    """Logits, losses and final states of texts, read in one call and in two kinds of pieces."""
    assert_recorded(MODELS[name](), name, torch.float64)
    assert_recorded(MODELS[name](random_pieces, dtype=FLOAT32), name)
    assert_recorded(MODELS[name](token_by_token, dtype=FLOAT32, lengths=[70]), name)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["cpu", "torch"])
@pytest.mark.parametrize("name", MODELS)
def test_backends(name: str, backend: str) -> None:
    """Every implementation of Mamba-2's recurrence, at every split."""
    for split in (one_call, random_pieces, token_by_token):
        for dtype in TOLERANCE:
            assert_recorded(MODELS[name](split, dtype=dtype, backend=backend), name, dtype)


@pytest.mark.parametrize("name", EVALUATIONS)
def test_losses(name: str) -> None:
    """Losses by position."""
    assert_recorded(CASES[name](), name)


@pytest.mark.parametrize("name", EXACT)
def test_texts(name: str) -> None:
    """Generated texts, and answers to passkey prompts."""
    assert CASES[name]() == RECORDED[name]
