"""Every cell and every position encoding trains in every kind of block."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from longrnn.cells import MIXERS
from longrnn.models import RecurrentLM
from longrnn.positions import POSITIONS
from tests.contracts.builders import BLOCK_KINDS, build_model, random_tokens

pytestmark = pytest.mark.core


def loss_of(model: RecurrentLM, tokens: Tensor) -> Tensor:
    logits = model(tokens[:, :-1]).logits
    return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


@pytest.mark.parametrize("block", BLOCK_KINDS)
@pytest.mark.parametrize(
    ("position", "mixer"),
    [("none", mixer) for mixer in MIXERS] + [(kind, "gru") for kind in POSITIONS if kind != "none"],
)
def test_one_step(position: str, mixer: str, block: str) -> None:
    """Every parameter gets a gradient, and a small step down it lowers the loss."""
    model = build_model(mixer, position, block)
    tokens = random_tokens(3, 20)
    before = loss_of(model, tokens)
    before.backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name
        assert parameter.grad.abs().max() > 0, name
    torch.optim.SGD(model.parameters(), lr=1e-2).step()
    assert loss_of(model, tokens) < before
