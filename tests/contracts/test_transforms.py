"""What torch records of a call contains what our kernels compute, or torch refuses the call."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx

from longrnn.errors import UserError
from longrnn.mixers import MIXERS
from longrnn.models import RecurrentLM
from longrnn.ops.cross_entropy import weighted_cross_entropy
from longrnn.state import leaves, tree_map
from tests.contracts.builders import (
    DEFINED,
    MIXER_SPECS,
    assert_near,
    build_mitigated,
    build_model,
    generator,
    random_state,
    random_tokens,
    random_tree,
    spec_id,
)

pytestmark = pytest.mark.core

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
@pytest.mark.parametrize("time", [1, 70])
@pytest.mark.parametrize("trained", [False, True])
def test_forward_mode_gives_the_derivative(spec: dict[str, Any], time: int, trained: bool) -> None:
    """With respect to inputs and states, whether or not there are gradients too."""
    mixer = MIXERS.build(spec, 8, 8).double().requires_grad_(trained)
    start = (random_tree(mixer.init_state(2), 0), torch.randn(2, time, 8, dtype=torch.float64))
    point, direction = (tree_map(partial(_double, seed), start) for seed in (1, 2))

    def outcome(given: tuple[Any, Tensor]) -> Tensor:
        y, after = mixer(given[1], given[0])
        return torch.cat([y.flatten(), *(leaf.flatten() for _, leaf in leaves(after))])

    with forward_ad.dual_level():
        given = tree_map(forward_ad.make_dual, point, direction)
        found = forward_ad.unpack_dual(outcome(given)).tangent
    assert found is not None
    assert_near(found, slope(outcome, point, direction), 1e-6)


def _double(seed: int, like: Tensor) -> Tensor:
    return torch.randn(like.shape, generator=generator(seed), dtype=torch.float64)


def slope(outcome: Callable[[Any], Tensor], point: Any, direction: Any) -> Tensor:
    """The derivative along a direction by central differences."""
    step = 1e-6
    moved = [tree_map(lambda one, way, s=s: one + s * way, point, direction) for s in (step, -step)]
    with torch.no_grad():
        ahead, behind = (outcome(one) for one in moved)
    return (ahead - behind) / (2 * step)


@pytest.mark.parametrize(("spec", "mixer"), DEFINED, ids=spec_id)
def test_func_gives_the_derivative_of_a_mitigated_model(
    spec: dict[str, Any], mixer: dict[str, Any]
) -> None:
    """`torch.func.jvp` and `torch.func.grad` with respect to the weights of a whole model."""
    model, tokens = build_mitigated([spec], mixer, n_layers=1), random_tokens(2, 9)
    weights = {name: weight.detach() for name, weight in model.named_parameters()}
    ways = {name: torch.randn_like(weight) for name, weight in weights.items()}

    def outcome(given: dict[str, Tensor]) -> Tensor:
        return torch.func.functional_call(model, given, (tokens,)).logits.square().mean()

    found = torch.func.jvp(outcome, (weights,), (ways,))[1]
    gradients = torch.func.grad(outcome)(weights)
    by_gradient = torch.stack([(gradients[name] * ways[name]).sum() for name in weights]).sum()
    moved = [outcome({n: w + s * ways[n] for n, w in weights.items()}) for s in (1e-6, -1e-6)]
    for derivative in (found, by_gradient):
        assert derivative.item() == pytest.approx((moved[0] - moved[1]).item() / 2e-6, rel=1e-4)


def test_a_loss_without_a_forward_derivative_is_refused() -> None:
    """The refusal names a loss that has one."""
    hidden, head, targets = torch.randn(3, 4), torch.randn(5, 4), torch.tensor([0, 1, 2])
    with forward_ad.dual_level():
        moving = forward_ad.make_dual(hidden, torch.ones_like(hidden))
        with pytest.raises(UserError, match="torch.nn.functional"):
            weighted_cross_entropy(moving, head, targets, torch.ones(3))
