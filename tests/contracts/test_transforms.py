"""What torch records of a call contains what our kernels compute, or torch refuses the call."""

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx

from longrnn import mitigation
from longrnn.cells import MIXERS
from longrnn.state import leaves, tree_map
from tests.contracts.builders import (
    DEFINED_FEW,
    MIXER_SPECS,
    Spec,
    assert_near,
    build_mitigated,
    build_mixer,
    build_model,
    mitigation_spec,
    random_tokens,
    random_tree,
    spec_id,
)

pytestmark = pytest.mark.core

EVERY = pytest.mark.parametrize("spec", MIXER_SPECS, ids=spec_id)


@EVERY
@pytest.mark.filterwarnings("ignore")  # of values that are read back, and of torch.jit
def test_a_traced_cell_reads_its_tokens(spec: Spec) -> None:
    cell = build_mixer(spec, torch.float32).requires_grad_(False)
    state = random_tree(cell.init_state(2), 1)
    first, second = (random_tree(torch.empty(2, 1, cell.d_input), seed) for seed in (1, 5))

    def call(x: Tensor) -> Tensor:
        return cell(x, state)[0]

    traced: list[Any] = [torch.jit.trace(call, first, check_trace=False)]
    with suppress(RuntimeError):  # it cannot record what reads values back
        traced.append(make_fx(call)(first))
    assert not torch.allclose(call(first), call(second))
    for one in traced:
        assert_near(one(second), call(second), 1e-5)


@EVERY
@pytest.mark.parametrize("time", [1, 70])
@pytest.mark.parametrize("trained", [False, True])
def test_forward_mode_gives_the_derivative(spec: Spec, time: int, trained: bool) -> None:
    mixer = MIXERS.build(spec, 8, 8).double().requires_grad_(trained)
    start = (random_tree(mixer.init_state(2), 0), torch.randn(2, time, 8, dtype=torch.float64))
    point, direction = (random_tree(start, seed) for seed in (1, 2))

    def outcome(given: tuple[Any, Tensor]) -> Tensor:
        y, after = mixer(given[1], given[0])
        return torch.cat([y.flatten(), *(leaf.flatten() for _, leaf in leaves(after))])

    with forward_ad.dual_level():
        given = tree_map(forward_ad.make_dual, point, direction)
        found = forward_ad.unpack_dual(outcome(given)).tangent
    assert found is not None
    assert_near(found, slope(outcome, point, direction), 1e-6)


def slope(outcome: Callable[[Any], Tensor], point: Any, direction: Any) -> Tensor:
    """The derivative along a direction by central differences."""
    step = 1e-6
    moved = [tree_map(lambda one, way, s=s: one + s * way, point, direction) for s in (step, -step)]
    with torch.no_grad():
        ahead, behind = (outcome(one) for one in moved)
    return (ahead - behind) / (2 * step)


@pytest.mark.parametrize(("spec", "mixer"), DEFINED_FEW, ids=spec_id)
def test_func_gives_the_derivative_of_a_mitigated_model(spec: Spec, mixer: Spec) -> None:
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


@pytest.mark.parametrize("mixer", MIXERS)
@pytest.mark.parametrize("spec", [None, mitigation_spec("state_norm")], ids=["plain", "mitigated"])
@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_vmap_gives_the_gradient_of_each_row(mixer: str, spec: Spec | None) -> None:
    model, tokens = build_model(mixer, n_layers=1), random_tokens(2, 9)
    model = model if spec is None else model.under(mitigation(spec))
    weights = {name: weight.detach() for name, weight in model.named_parameters()}

    def outcome(given: dict[str, Tensor], row: Tensor) -> Tensor:
        return torch.func.functional_call(model, given, (row[None],)).logits.square().mean()

    found = torch.func.vmap(torch.func.grad(outcome), in_dims=(None, 0))(weights, tokens)
    rows = [torch.func.grad(outcome)(weights, row) for row in tokens]
    for name in weights:
        torch.testing.assert_close(found[name], torch.stack([row[name] for row in rows]))
