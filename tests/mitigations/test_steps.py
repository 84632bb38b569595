"""Changes of the steps in every path; a stage that an implementation does not know is refused."""

import copy
from collections import namedtuple
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import register_parametrization

from longrnn.cells import MIXERS, Edit, merge
from longrnn.errors import UserError
from longrnn.mitigations import mitigation
from longrnn.models import RecurrentLM
from longrnn.models.fold import fold
from tests.contracts.builders import assert_near, build_model, mixer_spec, random_tokens
from tests.contracts.subjects import read
from tests.refusals import naming

pytestmark = pytest.mark.core

MIXER = {"kind": "mamba2", "d_state": 6, "head_dim": 4, "n_groups": 2}


def observed_steps(model: RecurrentLM, tokens: Tensor) -> Tensor:
    """The gains of the first cell, `(t, h)`: its steps, where nothing else multiplies x."""
    seen = list[Tensor]()
    hook = model.cells[0].recurrence.register_forward_hook(
        lambda _, args, output: seen.append(args[0].gain)
    )
    model(tokens)
    hook.remove()
    return seen[0][0]


@torch.no_grad()
def assert_decoding_equals_prefill(model: RecurrentLM, tokens: Tensor) -> None:
    whole = model(tokens)
    logits, state = read(model, tokens, None, [1] * tokens.shape[1])
    assert_near(logits, whole.logits, 1e-5)
    for ours, expected in zip(model.memories(state), model.memories(whole.state), strict=True):
        assert_near(ours, expected, 1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize(
    "before", ["none", "scale_delta(scale=0.3)", "scale_delta(scale=0.7)+scale_delta(scale=9.1)"]
)
def test_thresholds_taken_from_changed_steps_ignore_these_steps(
    before: str, dtype: torch.dtype
) -> None:
    """In a call of all tokens and one token at a time alike."""
    tokens = random_tokens(1, 24)
    model = build_model(MIXER, dtype=dtype, n_layers=1).under(before)
    steps = observed_steps(model, tokens)
    for head in range(model.cells[0].n_heads):
        for threshold in steps[:, head].tolist():
            ours = model.under(mitigation({"kind": "token_filter", "threshold": threshold}))
            ignored = observed_steps(ours, tokens)[:, head] == 0
            assert torch.equal(ignored, steps[:, head] <= threshold)
            if head == 0:
                assert_decoding_equals_prefill(ours, tokens)


@pytest.mark.parametrize(
    "spec",
    [
        "power_decay(scale=35)+token_filter(threshold=0.02)",
        "power_decay(scale=35)+power_decay(scale=0.03)",
        "scale_decay(scale=1e30)+scale_decay(scale=1e30)+token_filter(threshold=0.02)",
        "scale_decay(scale=1e-30)+power_decay(scale=20)+power_decay(scale=0.05)",
        "token_filter(threshold=0.02)+scale_delta(scale=3)+token_filter(threshold=0.07)",
    ],
)
def test_strong_changes_of_rates_are_finite_in_any_split(spec: str) -> None:
    model = build_model(MIXER, dtype=torch.float32)
    with torch.no_grad():
        for cell in model.cells:
            cell.A_log.copy_(torch.linspace(-2, 3, len(cell.A_log)))  # type: ignore[union-attr]
    assert_decoding_equals_prefill(model.under(spec), random_tokens(2, 24))


BASE: Any = namedtuple("BASE", [*Edit._fields, "extra"], defaults=[None] * 10)


class Extended(BASE):
    """An edit with a stage that no implementation knows."""

    stages, to, apply, refuse_unknown = Edit.stages, Edit.to, Edit.apply, Edit.refuse_unknown


def test_a_new_stage_is_not_dropped_by_merge() -> None:
    extended: Any = Extended(extra=1.0)
    assert extended.stages == {"extra"}
    assert extended.to(torch.device("cpu")).extra == 1.0
    with pytest.raises(KeyError, match="extra"):
        merge([extended, Extended()])


@pytest.mark.parametrize("backend", ["auto", "torch"])
@pytest.mark.parametrize("kind", list(MIXERS))
def test_a_stage_that_an_implementation_does_not_know_is_refused(kind: str, backend: str) -> None:
    """By every cell, and by the kernels that compute a whole layer or a whole stack."""
    spec = mixer_spec(kind) | ({"backend": backend} if MIXERS[kind].scans else {})
    model = build_model(spec, dtype=torch.float32)
    edit: Any = Extended(extra=1.0)
    model._edits = [edit] * len(model.cells)
    for tokens in (random_tokens(1, 5), random_tokens(1, 1)):
        with torch.no_grad(), pytest.raises(UserError, match="extra"):
            model(tokens)


@pytest.mark.parametrize(
    ("kind", "weight"),
    [
        ("mamba2", "A_log"),
        ("mamba", "dt_proj.bias"),
        ("kda", "dt_bias"),
        ("lstm", "cell.bias_hh_l0"),
    ],
)
@torch.no_grad()
def test_time_scales_of_a_weight_that_a_parametrization_computes(kind: str, weight: str) -> None:
    """They change what it computes, in calls of any number of tokens; it cannot be folded."""
    option = "rate" if weight == "A_log" else "bias"
    computed = build_model(mixer_spec(kind), n_layers=1).under(f"time_scales({option}=0.5)")
    stored = copy.deepcopy(computed)
    owner, _, name = f"blocks.0.mixer.{weight}".rpartition(".")
    register_parametrization(computed.get_submodule(owner), name, nn.Tanh())
    stored.get_parameter(f"{owner}.{name}").tanh_()
    for tokens in (random_tokens(1, 1), random_tokens(1, 9)):
        assert_near(computed(tokens).logits, stored(tokens).logits, 1e-10)
    with pytest.raises(UserError, match=naming(weight, "layer 0", "remove_parametrizations")):
        fold(computed)
