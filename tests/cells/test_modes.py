"""Cells in eval mode: the same values as in training mode, with gradients on every device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from longrnn.state import leaves
from tests.contracts.builders import (
    D_MODEL,
    MIXER_SPECS,
    build_mixer,
    random_tree,
    spec_id,
)

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("spec", MIXER_SPECS, ids=spec_id)
def test_both_modes_give_the_same_values_and_gradients(spec: dict[str, Any], device: str) -> None:
    """Outputs and the gradient in the initial state are equal in training and in eval mode."""

    def run(mode: bool) -> list[Tensor]:
        mixer = build_mixer(spec).to(device).train(mode)
        x = random_tree(torch.empty(2, 5, D_MODEL + 2, dtype=torch.float64), 0).to(device)
        state = random_tree(mixer.init_state(2), 1)
        before = [leaf.requires_grad_() for _, leaf in leaves(state)]
        y, _ = mixer(x, state)
        return [y, *torch.autograd.grad(y.sum(), before)]

    for one, other in zip(run(True), run(False), strict=True):
        assert torch.equal(one, other)
