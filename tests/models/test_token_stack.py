"""One token of all blocks at once, from weights and modules that change between tokens."""

import copy
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import register_parametrization

from longrnn.mitigations import MITIGATIONS
from longrnn.models import RecurrentLM
from longrnn.state import LMState, clone
from tests.contracts.builders import (
    assert_near,
    assert_trees_equal,
    build_mitigated,
    build_model,
    mitigation_spec,
    random_state,
    random_tokens,
)
from tests.contracts.subjects import needs_kernels, read

NATIVE = {"kind": "mamba2", "backend": "cpu", "d_state": 6, "head_dim": 4, "n_groups": 2}
SELECTIVE = {"kind": "mamba", "backend": "cpu", "d_state": 21}


def native_model(mixer: dict[str, Any] = NATIVE) -> RecurrentLM:
    return build_model(mixer, dtype=torch.float32, d_model=32).eval()


@torch.no_grad()
def decoded(model: RecurrentLM, state: LMState, seed: int = 0) -> tuple[Tensor, LMState]:
    """Logits of six tokens one by one, and the final state."""
    return read(model, random_tokens(len(state.position), 6, seed), state, [1] * 6)


MITIGATED: list[list[dict[str, Any]]] = [
    [{"kind": "power_decay", "scale": 60.0}, mitigation_spec("token_filter")],
    *([mitigation_spec(kind)] for kind in MITIGATIONS if kind != "none"),
    [
        {"kind": "scale_delta", "scale": [[0.5, 2.0, 1.0, 0.3, 1.0, 1.0, 3.0, 1.0], 0.8]},
        *(mitigation_spec(kind) for kind in ("token_filter", "power_decay", "scale_decay")),
        *(mitigation_spec(kind) for kind in ("scale_delta", "token_filter", "forget_more")),
        {"kind": "state_norm", "threshold": 0.02, "heads": [1, 2]},
        {"kind": "sliding_window", "window": 4, "heads": [0, 7]},
    ],
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("options", [1, 2, 8, {}, {"select_norm_eps": 1e-5, "bias": True}], ids=str)
@pytest.mark.parametrize("specs", MITIGATED, ids=lambda specs: specs[-1]["kind"])
@torch.no_grad()
def test_single_tokens_under_mitigations(specs: list, options: Any, dtype: torch.dtype) -> None:
    """They are those of one call in float64, and forks of a state do not meet."""
    if isinstance(options, dict):
        mixer, width = {**SELECTIVE, **options}, 4  # of eight channels
    else:
        mixer = {"kind": "mamba2", "d_state": 21, "head_dim": 8, "n_groups": options}
        width = 32
    model = build_mitigated(specs, mixer, d_model=width, dtype=dtype, residual_in_fp32=True)
    exact = copy.deepcopy(model).double()
    tokens = random_tokens(2, 12)
    state, whole = model(tokens).state, exact(tokens).state
    given = clone(state)
    forks = [decoded(model, state, seed) for seed in (1, 2)]
    assert_trees_equal(state, given)
    for seed, (found, after) in enumerate(forks, 1):
        expected, final = exact(random_tokens(2, 6, seed), whole)
        assert_near(found, expected, 2e-5 if dtype == torch.float32 else 0.1)
        for ours, wanted in zip(model.memories(after), exact.memories(final), strict=True):
            assert_near(ours, wanted, 2e-5 if dtype == torch.float32 else 0.1)
        assert_trees_equal(decoded(copy.deepcopy(model), clone(given), seed), (found, after))


@needs_kernels
def test_states_that_are_kept_are_never_written_to() -> None:
    """Also if only a part of one leaf is kept."""
    model = native_model()
    state, kept, parts = model.init_state(2), [], []
    with torch.no_grad():
        for index, token in enumerate(random_tokens(2, 40).split(1, 1)):
            state = model(token, state).state
            if index % 8 == 0:
                kept.append((state, clone(state)))
            part = state.layers[index % 2].ssm[1, 2:]
            if index % 8 == 1:
                parts.append((part, part.clone()))
    for one, copied in kept:
        assert_trees_equal(one, copied)
    for part, copied in parts:
        assert torch.equal(part, copied)


def replace_options(model: RecurrentLM) -> None:
    mixer: Any = model.cells[1]
    mixer.dt_limit, mixer.norm_eps, mixer.select_norm_eps = (0.0, 0.01), 0.5, 0.5


def parametrize(name: str) -> Callable[[RecurrentLM], object]:
    return lambda model: register_parametrization(model.get_submodule(name), "weight", nn.Tanh())


def stride(model: RecurrentLM) -> None:
    """The same numbers in memory, column by column: what `weight.data.t()` does to a square one."""
    weight = model.get_parameter("blocks.0.mixer.out_proj.weight")
    weight.data = weight.data.as_strided(weight.shape, (1, len(weight)))


def hook(name: str) -> Callable[[RecurrentLM], None]:
    def register(model: RecurrentLM) -> None:
        module = model.get_submodule(name)
        module.register_forward_pre_hook(lambda _, args: (args[0] * 2, *args[1:]))

    return register


CHANGES: dict[str, Callable[[RecurrentLM], Any]] = {
    "options": replace_options,
    "eps of a block": lambda model: setattr(model.blocks[0], "eps", 0.5),
    "other projection": lambda model: setattr(model.cells[0], "out_proj", nn.Linear(64, 32)),
    "strides of a projection": stride,
    "computed weight of a norm": parametrize("blocks.1.norm"),
    "computed weight of a convolution": parametrize("blocks.0.mixer.conv1d"),
    "hook of a block": hook("blocks.1"),
    "hook of a projection": hook("blocks.0.mixer.out_proj"),
    "backend": lambda model: setattr(model.cells[0], "backend", "torch"),
}


@pytest.mark.parametrize("mixer", [NATIVE, SELECTIVE], ids=lambda mixer: mixer["kind"])
@pytest.mark.parametrize("name", CHANGES)
def test_what_changes_between_tokens_takes_effect(name: str, mixer: dict[str, Any]) -> None:
    model = native_model(mixer)
    state = random_state(model, 2)
    before = decoded(model, state)[0]
    CHANGES[name](model)
    after = decoded(model, state)
    assert_trees_equal(after, decoded(copy.deepcopy(model), state))
    assert name == "backend" or not torch.allclose(after[0], before, rtol=1e-4, atol=1e-4)


def test_a_model_and_its_mitigated_copies_decode_in_turn() -> None:
    """Each with its own edits, although they share their weights."""
    model = native_model()
    copies = [model, *(model.under(mitigation_spec(k)) for k in ("forget_more", "none"))]
    state = random_state(model, 2)
    alone = [decoded(copy.deepcopy(one), state) for one in copies]
    assert not torch.allclose(alone[0][0], alone[1][0])
    for _ in range(2):
        assert_trees_equal([decoded(one, state) for one in copies], alone)


@needs_kernels
def test_threads_decode_with_one_model() -> None:
    """Each its own state, whose memory comes from the same place."""
    model = native_model()
    state = random_state(model, 2)
    wanted = [decoded(model, state, seed) for seed in range(4)]
    with ThreadPoolExecutor(4) as pool:
        for _ in range(3):
            found = list(pool.map(lambda seed: decoded(model, state, seed), range(4)))
            assert_trees_equal(found, wanted)
