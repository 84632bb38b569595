"""A cell with nothing but the methods that CONTRIBUTING.md lists has everything that cells have."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from longrnn import generate, mitigation
from longrnn.errors import UserError
from longrnn.imports import import_module
from longrnn.mitigations import MITIGATIONS
from longrnn.models import RecurrentLM, Rows
from tests.contracts.builders import assert_near, build_model, mitigation_spec, random_tokens
from tests.contracts.subjects import assert_same, outcome, random_masks, read, small_chunks, started
from tests.guide import forgotten, write_examples

# The cells of the guide, with their options, in its order.
CELLS = [{"kind": "mine", "bias": False}, {"kind": "gated_linear", "n_heads": 2}]
FILES = {"mine": "my_cell.py", "gated_linear": "my_scan.py"}
MEMORIES = {"mine": (2, 1, 8, 1), "gated_linear": (2, 2, 4, 4)}


@pytest.fixture(params=CELLS, ids=lambda spec: spec["kind"])
def model(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[RecurrentLM]:
    """A model with a cell of the guide."""
    write_examples(tmp_path)
    with forgotten():
        import_module(str(tmp_path / FILES[request.param["kind"]]))
        yield build_model(request.param)


@pytest.mark.parametrize("name", [None, *MITIGATIONS])
def test_it_splits_packs_and_generates(model: RecurrentLM, name: str | None) -> None:
    cell = model.cells[0]
    if name is not None:
        if MITIGATIONS[name].undefined(type(cell)) is not None:
            with pytest.raises(UserError, match=f"{name}.*{cell.kind}"):
                model.under([mitigation(mitigation_spec(name))])
            return
        model = model.under([mitigation(mitigation_spec(name))])
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
    assert all(memory.shape == MEMORIES[cell.kind] for memory in model.memories(state))
