"""One token of all Mamba-2 layers in C++ against their modules one by one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from longrnn.cells.mamba2 import Mamba2
from longrnn.models import RecurrentLM
from longrnn.models.checkpoint import cast_weights
from longrnn.models.token_stack import TokenStack
from longrnn.ops import native
from longrnn.state import LMState, leaves
from tests.contracts.builders import assert_near, build_model, random_state, random_tokens
from tests.ops.test_native import library

__all__ = ["library"]  # a fixture

pytestmark = pytest.mark.skipif(not native.available(), reason=str(native.missing()))
SHAPES: list[dict[str, Any]] = [
    {"d_state": 6, "head_dim": 4, "n_groups": 2},
    {"d_state": 5, "head_dim": 8, "bias": True, "conv_bias": False, "d_conv": 1},
    {"d_state": 17, "head_dim": 16, "dt_limit": [0.01, 0.05]},
    {"d_state": 6, "head_dim": 4, "d_conv": native.MOST_TAPS},
]
# One rounding of the residual stream to bfloat16 is relative to its largest entry.
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2e-2}


def model_of(options: dict[str, Any], dtype: torch.dtype, wide: bool = False) -> RecurrentLM:
    spec = {"kind": "mamba2", "backend": "native", **options}
    model = build_model(spec, dtype=torch.float32, d_model=32, residual_in_fp32=wide)
    return cast_weights(model, dtype).eval()


@torch.no_grad()
def decode(model: RecurrentLM, rows: int, state: LMState) -> list[Tensor]:
    """Logits of three tokens one by one, and the final state."""
    found = []
    for token in random_tokens(rows, 3).split(1, 1):
        logits, state = model(token, state)
        found.append(logits)
    return [*found, *(leaf for _, leaf in leaves(state.layers))]


def one_by_one(*_: object) -> None:
    """Layers that cannot be computed at once."""


@pytest.mark.usefixtures("library")
@pytest.mark.parametrize("options", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("wide", [False, True], ids=["narrow", "wide"])
def test_a_layer_at_once_gives_its_modules_one_by_one(
    options: dict[str, Any], dtype: torch.dtype, wide: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For one row to the largest number of rows, in either dtype of the residual stream."""
    model = model_of(options, dtype, wide)
    for rows in (1, native.FEW_ROWS):
        state = random_state(model, rows)
        with monkeypatch.context() as patch:
            patch.setattr(Mamba2, "run", None)  # at once, or not at all
            ours = decode(model, rows, state)
            patch.undo()
            patch.setattr(TokenStack, "run", one_by_one)
            theirs = decode(model, rows, state)
        for one, other in zip(ours, theirs, strict=True):
            assert one.dtype == other.dtype
            assert_near(one, other, TOLERANCE[dtype])


def test_a_wider_convolution_than_the_kernel_holds_is_computed_by_the_modules(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = model_of({"d_state": 6, "head_dim": 4, "d_conv": native.MOST_TAPS + 1}, torch.float32)
    state = random_state(model, 2)
    ours = decode(model, 2, state)
    monkeypatch.setattr(TokenStack, "run", one_by_one)
    for one, other in zip(ours, decode(model, 2, state), strict=True):
        assert_near(one, other, 1e-6)


@pytest.mark.parametrize("name", ["blocks.0", "blocks.0.mixer", "blocks.0.mixer.in_proj"])
def test_hooks_see_every_token(name: str) -> None:
    model = model_of(SHAPES[0], torch.float32)
    calls: list[int] = []
    module = model.get_submodule(name)
    module.register_forward_hook(lambda *_: calls.append(1))
    module.register_forward_pre_hook(lambda *_: calls.append(1))
    decode(model, 1, model.init_state(1))
    assert len(calls) == 6


def test_a_replaced_projection_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    """As by adapters, which put a module of their own in its place, or replace its `forward`."""
    model = model_of(SHAPES[0], torch.float32)
    state, mixer = model.init_state(1), model.cells[0]
    plain = decode(model, 1, state)
    assert isinstance(mixer, Mamba2)
    forward = mixer.in_proj.forward
    monkeypatch.setattr(mixer.in_proj, "forward", lambda x: 2 * forward(x))
    assert not torch.equal(decode(model, 1, state)[0], plain[0])


def test_a_state_that_is_not_finite_gives_what_the_modules_give(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Only the outputs of its row are NaN."""
    model = model_of(SHAPES[0], torch.float32)
    state = random_state(model, 2)
    state.layers[0].ssm[0, 0, 0, 0] = torch.nan
    ours = decode(model, 2, state)
    monkeypatch.setattr(TokenStack, "run", one_by_one)
    for one, other in zip(ours, decode(model, 2, state), strict=True):
        assert torch.equal(one[0].isnan().any(), other[0].isnan().any())
        torch.testing.assert_close(one[1], other[1])
        assert one[1].isfinite().all()


def test_gradients_and_weights_changed_in_place_are_respected() -> None:
    model = model_of(SHAPES[0], torch.float32)
    token, state = random_tokens(1, 1), model.init_state(1)
    tracked = model(token, state).logits
    assert tracked.requires_grad
    with torch.no_grad():
        assert_near(model(token, state).logits, tracked.detach(), 1e-6)
        before = model(token, state).logits
        model.get_parameter("blocks.0.mixer.in_proj.weight").mul_(2)
        assert not torch.equal(model(token, state).logits, before)
