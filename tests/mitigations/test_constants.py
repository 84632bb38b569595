"""The numbers of a mitigation are copied to a device once."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch

from longrnn.cells import EditedState
from longrnn.mitigations.values import Constant
from longrnn.state import tree_map
from tests.contracts.builders import DEFINED, build_mitigated, spec_id
from tests.devices import GPU, CopyCounter


@torch.no_grad()
@pytest.mark.parametrize(
    ("spec", "mixer"),
    [case for case in DEFINED if case[0]["kind"] != "sliding_window"],  # which reads its phase
    ids=spec_id,
)
def test_a_second_call_copies_nothing_to_the_device(
    spec: dict[str, Any], mixer: dict[str, Any]
) -> None:
    """A call of one token, in every layer, finds the numbers on the device."""
    model = build_mitigated([spec], mixer)
    edit, cell = model.edits[0], model.cells[0]
    carry = tree_map(lambda leaf: leaf.to(GPU), edit.init_carry(cell, 2))
    cell.to(GPU)
    x = torch.zeros(2, 1, cell.d_input, dtype=torch.float64, device=GPU)
    state = EditedState(cell.init_state(2), carry)
    counter = CopyCounter()
    for _ in range(2):
        counter = CopyCounter()
        with counter:
            cell(x, state, edit)
    assert counter.copies == []


def test_a_constant_is_copied_once() -> None:
    """Per device and dtype; copies of the object copy only what is on the CPU."""
    value = torch.tensor([1.0, 2.0], dtype=torch.float64)
    constant = Constant(value)
    assert constant.on(torch.device("cpu")) is constant.on(torch.device("cpu"))
    like = torch.zeros(1, dtype=torch.float32)
    assert constant.like(like) is constant.like(like)
    assert constant.like(like).dtype == torch.float32
    for other in (copy.deepcopy(constant), pickle.loads(pickle.dumps(constant))):
        assert torch.equal(other.value, value)
        assert torch.equal(other.like(like), value.float())


def test_a_constant_made_in_inference_mode_serves_gradients() -> None:
    """An evaluation in inference mode may come before training."""
    constant = Constant(torch.tensor([2.0], dtype=torch.float64))
    like = torch.ones(1, requires_grad=True)
    with torch.inference_mode():
        constant.like(like)
    (like * constant.like(like)).sum().backward()
    assert like.grad == 2
