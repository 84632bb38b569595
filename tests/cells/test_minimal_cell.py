"""A cell with nothing but the methods that CONTRIBUTING.md lists has everything that cells have."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from longrnn import generate, mitigation
from longrnn.cells import MIXERS
from longrnn.errors import UserError
from longrnn.mitigations import MITIGATIONS
from longrnn.models import RecurrentLM, Rows
from tests.contracts.builders import (
    assert_near,
    build_model,
    mitigation_spec,
    random_state,
    random_tokens,
)
from tests.contracts.subjects import (
    assert_same,
    outcome,
    random_masks,
    read,
    small_chunks,
    started,
)

GUIDE = Path(__file__).parents[2] / "CONTRIBUTING.md"
IMPORTS = """
from typing import NamedTuple
import torch
from torch import Tensor, nn
from longrnn.cells import MIXERS, StepwiseCell, Update
"""


@pytest.fixture
def model() -> Iterator[RecurrentLM]:
    """A model with the cell of the guide."""
    section = GUIDE.read_text().split("## Add a cell")[1].split("## ")[0]
    (block,) = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    module = sys.modules["guide"] = ModuleType("guide")
    exec(compile(IMPORTS + block, "guide", "exec"), vars(module))
    try:
        yield build_model({"kind": "mine", "bias": False})
    finally:
        del MIXERS["mine"], sys.modules["guide"]


def members() -> Iterator[Any]:
    for kind, member in MITIGATIONS.items():
        if member.undefined(MIXERS["gru"]) is None:
            yield pytest.param([mitigation(mitigation_spec(kind))], id=kind)


@pytest.mark.parametrize("specs", [[], *members()])
def test_it_splits_packs_and_generates(model: RecurrentLM, specs: list[Any]) -> None:
    model = model.under(specs)
    tokens, masks = random_tokens(2, 40), random_masks(2, 40)
    state = started(model, 2)
    whole = outcome(model, tokens, state, [40])
    with small_chunks():
        assert_same(outcome(model, tokens, state, [17, 1, 0, 22]), whole, torch.float64)
    packed, _ = read(model, tokens, state, [40], masks)
    parts, _ = read(model, tokens, state, [1] * 40, masks)
    assert_near(packed, parts, 1e-10)
    model(tokens, rows=Rows(is_document_start=masks[1])).logits.sum().backward()
    assert generate(model, tokens, max_new_tokens=3).state.position.tolist() == [43] * 2
    assert all(memory.shape == (2, 1, 8, 1) for memory in model.memories(state))


def test_a_mitigation_of_steps_is_refused(model: RecurrentLM) -> None:
    with pytest.raises(UserError, match="scale_delta.*mine"):
        model.under(mitigation("scale_delta(scale=2)"))
    assert random_state(model, 1).layers[0].h.shape == (1, 8)
