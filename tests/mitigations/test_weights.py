"""A mitigated model always uses its current weights, however they were changed.

For every mitigation and cell: weights changed in place, or given for one call by
`torch.func.functional_call`, give the same bits as a model that is built with them.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from longrnn.cells import ScanningCell, Steps
from longrnn.errors import UserError
from longrnn.mitigations import Mitigated, mitigation
from longrnn.models import RecurrentLM
from longrnn.models.base import LMOutput
from longrnn.state import LMState, leaves
from tests.contracts.builders import (
    DEFINED,
    assert_trees_equal,
    build_mitigated,
    build_model,
    functional,
    generator,
    gradients,
    parameters,
    random_start,
    random_tokens,
    random_tree,
    recurrent,
    spec_id,
)

Spec = dict[str, Any]
every_pair = pytest.mark.parametrize(("spec", "mixer"), DEFINED, ids=spec_id)
TOKENS = random_tokens(2, 23)
WINDOW: Spec = {"kind": "sliding_window", "window": 4}


def weights_of(model: RecurrentLM) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in model.named_parameters()}


def copied(ours: Mitigated, weights: dict[str, Tensor]) -> None:
    with torch.no_grad():
        for name, parameter in recurrent(ours).named_parameters():
            parameter.copy_(weights[name])


def through_data(ours: Mitigated, weights: dict[str, Tensor]) -> None:
    for name, parameter in recurrent(ours).named_parameters():
        parameter.data.copy_(weights[name])


def replaced(ours: Mitigated, weights: dict[str, Tensor]) -> None:
    for name, parameter in recurrent(ours).named_parameters():
        parameter.data = weights[name].clone()


def loaded(ours: Mitigated, weights: dict[str, Tensor]) -> None:
    recurrent(ours).load_state_dict(weights, strict=False)


CHANGES = [copied, through_data, replaced, loaded]


def run(model: Any, seed: int = 3) -> LMOutput:
    """Two calls, from non-zero memories."""
    state = random_start(model, len(TOKENS), seed)
    first = model(TOKENS[:, :10], state)
    return model(TOKENS[:, 10:], first.state)


@every_pair
@pytest.mark.parametrize("change", CHANGES)
def test_weights_changed_in_place_are_used(
    change: Callable[..., None], spec: Spec, mixer: Spec
) -> None:
    """Outputs, states, tag and fingerprint equal those of a model built with the weights."""
    ours, rebuilt = build_mitigated([spec], mixer), build_mitigated([spec], mixer, seed=7)
    before, stale = run(ours), ours.init_state(2)
    change(ours, weights_of(recurrent(rebuilt)))
    expected = run(rebuilt)
    assert not torch.equal(before.logits, expected.logits)
    assert_trees_equal(run(ours), expected)
    assert ours.fingerprint() == rebuilt.fingerprint()
    for old in (stale, before.state):
        with pytest.raises(UserError):
            ours(TOKENS, old)
    adopted = ours.adopt(before.state)
    assert_trees_equal(ours(TOKENS, adopted), rebuilt(TOKENS, adopted))


@every_pair
@torch.no_grad()
def test_weights_of_functional_call_are_used(spec: Spec, mixer: Spec) -> None:
    """`functional_call` uses the given weights and leaves the module unchanged."""
    ours, rebuilt = build_mitigated([spec], mixer), build_mitigated([spec], mixer, seed=7)
    before, expected = run(ours), run(rebuilt)
    weights = {f"model.{name}": value for name, value in weights_of(recurrent(rebuilt)).items()}

    def given(*arguments: Any) -> LMOutput:
        return torch.func.functional_call(ours, weights, arguments)

    start = random_start(rebuilt, len(TOKENS), 3)
    first = given(TOKENS[:, :10], start)
    assert_trees_equal(given(TOKENS[:, 10:], first.state), expected)
    assert_trees_equal(given(TOKENS), rebuilt(TOKENS))
    with pytest.raises(UserError):
        given(TOKENS, ours.init_state(2))
    assert_trees_equal(run(ours), before)


@every_pair
def test_an_edit_does_not_depend_on_weights(spec: Spec, mixer: Spec) -> None:
    """Cells with different weights give equal edits."""

    def stored(ours: Mitigated) -> list[str]:
        parts = [part for edit in ours.edits for part in edit.edits]
        return [f"{type(part).__name__} {vars(part)}" for part in parts]

    ours = build_mitigated([spec], mixer)
    assert stored(ours) == stored(build_mitigated([spec], mixer, seed=7))
    assert not any(
        value.requires_grad
        for edit in ours.edits
        for part in edit.edits
        for value in vars(part).values()
        if isinstance(value, Tensor)
    )


@every_pair
def test_a_converted_model_equals_one_built_in_that_dtype(spec: Spec, mixer: Spec) -> None:
    """Converting the dtype after wrapping gives the same results."""
    ours = build_mitigated([spec], mixer).to(torch.float32)
    assert_trees_equal(run(ours), run(build_mitigated([spec], mixer, dtype=torch.float32)))


@every_pair
def test_gradients_equal_finite_differences(spec: Spec, mixer: Spec) -> None:
    """For every parameter, along a random direction, by central differences."""
    ours = build_mitigated([spec], mixer)
    start = random_start(ours, len(TOKENS), 3)
    names = dict(ours.named_parameters())

    def value(weights: dict[str, Tensor]) -> Tensor:
        state = start
        if weights:
            state = torch.func.functional_call(_Adopting(ours), _inside(weights), (start,))
        call = (TOKENS, state)
        logits, after = torch.func.functional_call(ours, weights, call) if weights else ours(*call)
        return functional((logits, after._replace(extra=())), seed=5)

    found = torch.autograd.grad(value({}), list(names.values()), materialize_grads=True)
    for (name, weight), gradient in zip(names.items(), found, strict=True):
        direction = torch.randn(weight.shape, generator=generator(1), dtype=torch.float64)
        step = 1e-5 * direction
        with torch.no_grad():
            difference = float(value({name: weight + step}) - value({name: weight - step})) / 2e-5
        expected = float((gradient * direction).sum())
        size = max(abs(expected), float(gradient.norm()), 1e-3)
        assert abs(difference - expected) <= 1e-6 * size, (name, difference, expected)


class _Adopting(torch.nn.Module):
    """`adopt` as a call, for `functional_call`."""

    def __init__(self, ours: Mitigated) -> None:
        super().__init__()
        self.ours = ours

    def forward(self, state: LMState) -> LMState:
        return self.ours.adopt(state)


def _inside(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    return {f"ours.{name}": value for name, value in weights.items()}


def test_power_decay_gradient_has_the_factor() -> None:
    """The gradient of A_log is s times that of a model whose rates are the powers."""
    scale = 3.0
    ours = build_mitigated([{"kind": "power_decay", "scale": scale}])
    direct = build_model()
    with torch.no_grad():
        for mixer in direct.cells:
            mixer.A_log.mul_(scale)  # type: ignore[union-attr]
    found = gradients(ours(TOKENS).logits, parameters(recurrent(ours)))
    expected = gradients(direct(TOKENS).logits, parameters(direct))
    for name, gradient in expected.items():
        factor = scale if name.endswith("A_log") else 1.0
        torch.testing.assert_close(found[name], factor * gradient, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=spec_id)
def test_a_step_equal_to_the_threshold_is_filtered(dtype: torch.dtype) -> None:
    """In all heads, because dt itself is compared, and not a product with the rate."""
    heads = 64
    model = build_model({"kind": "mamba2", "d_state": 2, "head_dim": 1, "expand": 8}, dtype=dtype)
    cell = model.cells[0]
    assert isinstance(cell, ScanningCell)
    assert cell.n_heads == heads
    dt = torch.rand(1, 50, heads, generator=generator(0), dtype=torch.float64).to(dtype)
    for threshold in dt[0, :, 0].tolist():
        edit = Mitigated(model, mitigation({"kind": "token_filter", "threshold": threshold})).edits
        step = torch.full((1, 1, heads), threshold, dtype=dtype)
        above = torch.nextafter(step, step + 1)
        steps = Steps(torch.ones(1, 2, heads, 1), torch.cat([step, above], 1), cell.rates())
        filtered, _ = edit[0].edit_steps(steps, ((),))
        assert (filtered.dt[:, 0] == 0).all()
        assert (filtered.x[:, 0] == 0).all()
        assert torch.equal(filtered.dt[:, 1:], above)


@contextmanager
def counted(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Counts how often the weights of a model are hashed."""
    calls: list[int] = []
    hashed = RecurrentLM.fingerprint

    def count(self: RecurrentLM) -> str:
        calls.append(1)
        return hashed(self)

    with monkeypatch.context() as patch:
        patch.setattr(RecurrentLM, "fingerprint", count)
        yield calls


def test_weights_are_hashed_once_per_change(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not at construction, and not in every call."""
    with counted(monkeypatch) as calls:
        ours = build_mitigated([WINDOW])
        assert len(calls) == 0
        state = ours.init_state(2)
        for _ in range(5):
            state = ours(TOKENS, state).state
        ours(TOKENS).logits.sum().backward()
        assert len(calls) == 1
        optimizer = torch.optim.AdamW(ours.parameters(), lr=1e-3)
        for number in range(2, 5):
            ours(TOKENS).logits.sum().backward()
            optimizer.step()
            ours(TOKENS)
            assert len(calls) == number


@pytest.mark.parametrize("part", ["one entry", "a rate through data", "another layout"])
def test_a_small_change_of_weights_is_detected(part: str) -> None:
    """One entry of a large weight, and a rate written through `.data`, are detected."""
    ours = build_mitigated([WINDOW], vocab_size=300)
    state, cell = ours.init_state(2), ours.cells[1]
    with torch.no_grad():
        if part == "one entry":
            recurrent(ours).embedding.weight[217, 3] += 1e-9
        elif part == "a rate through data":
            cell.A_log.data[2] += 1e-9  # type: ignore[operator]
        else:
            square = recurrent(ours).get_parameter("blocks.0.mixer.out_proj.weight")
            square.data = square.data.t().contiguous().t()
            state = state._replace(position=state.position)
    if part == "another layout":
        ours(TOKENS, state)  # the same entries in another order of memory are the same weights
        return
    with pytest.raises(UserError):
        ours(TOKENS, state)


def test_a_weight_at_a_reused_address_is_detected() -> None:
    """New weights in memory that was freed are not mistaken for the old ones."""
    ours = build_mitigated([WINDOW])
    parameter = recurrent(ours).embedding.weight
    for _ in range(20):
        state = ours.init_state(2)
        parameter.data = torch.randn_like(parameter)
        with pytest.raises(UserError):
            ours(TOKENS, state)


def test_a_copy_is_independent() -> None:
    """A copy accepts states of the original until its weights are changed."""
    ours = build_mitigated([WINDOW])
    state = ours.init_state(2)
    other = copy.deepcopy(ours)
    assert_trees_equal(other(TOKENS, state), ours(TOKENS, state))
    with torch.no_grad():
        recurrent(other).embedding.weight.add_(1)
    ours(TOKENS, state)
    with pytest.raises(UserError):
        other(TOKENS, state)


def test_changes_are_detected_in_inference_mode() -> None:
    """Inference tensors have no change count, and are compared by their entries."""
    with torch.inference_mode():
        ours = build_mitigated([WINDOW])
        state = ours.init_state(2)
        ours(TOKENS, state)
        ours.model.norm.weight.mul_(2)  # type: ignore[union-attr]
        with pytest.raises(UserError):
            ours(TOKENS, state)


def test_torch_func_gradients_equal_autograd() -> None:
    """`torch.func.grad` of a call gives the gradients of autograd."""
    ours = build_mitigated([{"kind": "forget_more"}], "gru")
    weights = {name: value.detach() for name, value in ours.named_parameters()}

    def loss(given: dict[str, Tensor]) -> Tensor:
        return torch.func.functional_call(ours, given, (TOKENS,)).logits.square().sum()

    found: dict[str, Tensor] = {}
    for _ in range(2):
        found = torch.func.grad(loss)(weights)
    expected = torch.autograd.grad(ours(TOKENS).logits.square().sum(), list(ours.parameters()))
    for gradient, (name, _) in zip(expected, ours.named_parameters(), strict=True):
        torch.testing.assert_close(found[name], gradient)


def test_adopt_refuses_states_that_do_not_fit() -> None:
    """The state of a plain model, and one with another carry, raise."""
    ours = build_mitigated([WINDOW])
    with pytest.raises(UserError, match="init_state"):
        ours.adopt(ours.model.init_state(2))
    for other in ({"kind": "forget_more"}, WINDOW | {"window": 9}):
        with pytest.raises(UserError):
            ours.adopt(build_mitigated([other]).init_state(2))


def test_random_starts_are_not_zero() -> None:
    """The initial states of this file are non-zero and fit the model."""
    state = random_start(build_mitigated([WINDOW]), 2, 3)
    assert all((leaf != 0).any() for name, leaf in leaves(state.layers))
    assert_trees_equal(random_tree(state.layers, 3), state.layers)
