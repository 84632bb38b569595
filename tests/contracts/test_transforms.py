"""What torch records of a call contains what our kernels compute, or torch refuses the call."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx

from longrnn.mixers import MIXERS
from longrnn.models import RecurrentLM
from longrnn.state import tree_map
from tests.contracts.builders import (
    MIXER_SPECS,
    assert_near,
    build_model,
    random_state,
    random_tokens,
    random_tree,
    spec_id,
)

EVERY = pytest.mark.parametrize("spec", MIXER_SPECS, ids=spec_id)


class Logits(nn.Module):
    """Tokens that are known to be valid, to logits."""

    def __init__(self, model: RecurrentLM) -> None:
        super().__init__()
        self.model, self.state = model, random_state(model, 2)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.model(tokens, self.state, checked=True).logits


@EVERY
@pytest.mark.filterwarnings("ignore")  # of values that are read back, and of torch.jit
def test_a_traced_model_reads_its_tokens(spec: dict[str, Any]) -> None:
    """Without gradients, when models run the fastest code that they have."""
    model = Logits(build_model(spec, dtype=torch.float32).requires_grad_(False))
    first, second = (random_tokens(2, 1, seed) for seed in (1, 5))
    traced: list[Any] = [torch.jit.trace(model, first, check_trace=False)]
    with suppress(RuntimeError):  # it cannot record what reads values back
        traced.append(make_fx(model)(first))
    assert not torch.allclose(model(first), model(second))
    for one in traced:
        assert_near(one(second), model(second), 1e-5)


@EVERY
def test_forward_mode_gives_a_derivative_or_refuses(spec: dict[str, Any]) -> None:
    mixer = MIXERS.build(spec, 8, 8).requires_grad_(False)
    x, state = torch.randn(2, 5, 8), random_tree(mixer.init_state(2), 1)
    direction = tree_map(torch.randn_like, state)
    with forward_ad.dual_level():
        given = tree_map(forward_ad.make_dual, state, direction)
        try:
            y, _ = mixer(x, given)
        except NotImplementedError:  # torch has no derivative of an operation
            return
        found = forward_ad.unpack_dual(y).tangent
    assert found is not None
    step = 1e-3
    moved = [tree_map(lambda one, way, s=s: one + s * way, state, direction) for s in (step, -step)]
    ahead, behind = (mixer(x, one)[0] for one in moved)
    assert_near(found, (ahead - behind) / (2 * step), 1e-2)
