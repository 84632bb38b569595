"""Projections in int8: their values, and what such a model refuses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from typer.testing import CliRunner

from longrnn.cli.app import app
from longrnn.errors import UserError
from longrnn.hf.auto.model import LongRNNForCausalLM
from longrnn.hf.loading import load
from longrnn.mitigations import Mitigated, mitigation
from longrnn.mixers.mamba2 import Mamba2
from longrnn.models import RecurrentLM
from longrnn.models.checkpoint import save_model
from longrnn.models.quantise import quantise
from longrnn.ops import native
from longrnn.ops.linear import Int8Linear
from tests.contracts.builders import assert_near, build_model, random_tokens

TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-6, torch.bfloat16: 2e-2}


def layer(bias: bool, dtype: torch.dtype) -> tuple[Int8Linear, nn.Linear]:
    """A layer in int8, and one whose weight is what the first one stores."""
    torch.manual_seed(0)
    source = nn.Linear(200, 70, bias=bias)
    with torch.no_grad():
        source.weight[3] = 0
        source.weight[4] *= 1000
    ours = Int8Linear(source.to(dtype))
    wide = ours.weight.float() * ours.scale[:, None]
    error = (source.weight.detach().float() - wide).abs()
    assert bool((error <= 0.501 * ours.scale[:, None] + 1e-30).all())
    with torch.no_grad():
        source.weight.copy_(wide)
    return ours, source


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", [(1,), (1, 1), (2, 2), (3, 40)], ids=str)
@torch.no_grad()
def test_a_product_is_that_of_the_stored_weight(
    dtype: torch.dtype, bias: bool, shape: tuple[int, ...]
) -> None:
    """For few rows, which the C++ kernel computes, and for many."""
    ours, exact = layer(bias, dtype)
    x = torch.randn(*shape, 200).to(dtype)
    y = ours(x)
    assert y.dtype == dtype
    assert_near(y.double(), exact.double()(x.double()), TOLERANCE[dtype])


@torch.no_grad()
def test_float16_holds_the_product_of_many_rows() -> None:
    """Although the sum of products with the integers would leave its range."""
    torch.manual_seed(0)
    source = nn.Linear(512, 16, bias=False)
    x = 60 * torch.randn(8, 512)
    source.weight.mul_(20)
    y = Int8Linear(source).half()(x.half())
    assert_near(y.float(), source(x), 2e-2)


@torch.no_grad()
def test_a_cast_of_the_model_does_not_round_the_scales() -> None:
    ours, _ = layer(True, torch.float32)
    scale = ours.scale.clone()
    ours.to(torch.bfloat16)
    assert torch.equal(ours.scale, scale)
    assert ours.bias.dtype == torch.bfloat16


def logits(model: Any, sizes: list[int]) -> Tensor:
    """Logits of 12 tokens in pieces, without gradients."""
    state, found = None, []
    with torch.no_grad():
        for part in random_tokens(1, 12).split(sizes, 1):
            part_logits, state = model(part, state)
            found.append(part_logits)
    return torch.cat(found, 1)


@pytest.mark.parametrize("spec", [None, "forget_more+state_norm(threshold=1.0)"])
def test_a_loaded_checkpoint_predicts_nearly_the_same(spec: str | None) -> None:
    """Also under mitigations, in pieces, and one token at a time."""
    name = "passkey-tiny" if spec is None else f"passkey-tiny+{spec}"
    plain, rounded = load(name), load(name, weights="int8")
    exact = logits(plain, [12]).softmax(-1)
    for sizes in ([12], [5, 7], [1] * 12):
        assert_near(logits(rounded, sizes).softmax(-1), exact, 0.1)
    assert rounded.fingerprint() != plain.fingerprint()
    assert_near(logits(load(name), [12]).softmax(-1), exact, 1e-6)


@pytest.mark.skipif(not native.available(), reason="the kernels were not compiled")
def test_one_token_is_one_call_of_cpp(monkeypatch: pytest.MonkeyPatch) -> None:
    model = load("passkey-tiny", weights="int8")
    expected = logits(model, [12])
    monkeypatch.setattr(Mamba2, "run", None)
    assert_near(logits(model, [1] * 12), expected, 1e-4)


def test_it_has_no_gradients_and_cannot_be_saved(tmp_path: Path) -> None:
    model = load("passkey-tiny", weights="int8")
    assert isinstance(model, RecurrentLM)
    assert not model(random_tokens(1, 3)).logits.requires_grad
    mixer = model.mixers[0]
    x = torch.randn(1, 3, mixer.d_input, requires_grad=True)
    with pytest.raises(UserError):
        mixer(x, mixer.init_state(1))
    with pytest.raises(UserError):
        save_model(model, tmp_path / "model")
    with pytest.raises(UserError):
        LongRNNForCausalLM.of(model).save_pretrained(tmp_path / "model")
    assert not (tmp_path / "model").exists()


@pytest.mark.parametrize("strict", [True, False])
def test_weights_that_are_not_in_int8_cannot_be_loaded_into_it(strict: bool) -> None:
    """Not even with strict=False; its own state dict can be loaded."""
    plain, rounded = (load("passkey-tiny", weights=weights) for weights in (None, "int8"))
    expected = logits(rounded, [12])
    own = {name: one.clone() for name, one in rounded.state_dict().items()}
    with pytest.raises(UserError, match="torch.float"):
        rounded.load_state_dict(plain.state_dict(), strict=strict)
    rounded.load_state_dict(own)
    assert torch.equal(logits(rounded, [12]), expected)


def test_what_has_no_such_projections_is_refused() -> None:
    with pytest.raises(UserError, match="int8"):
        load("passkey-tiny", weights="int9")
    with pytest.raises(UserError, match="Mamba-2"):
        quantise(build_model("gru"), "int8")
    model = build_model("mamba2")
    mitigated = Mitigated(model, mitigation("forget_more"))
    with pytest.raises(UserError, match="Mamba-2"):
        quantise(mitigated, "int8")


def test_weights_in_int8_are_not_rounded_again() -> None:
    model = build_model("mamba2")
    quantise(model, "int8")
    before = model.fingerprint()
    quantise(model, "int8")
    assert model.fingerprint() == before


def test_a_replaced_projection_is_refused() -> None:
    """As one with an adapter, which would be lost."""
    model = build_model("mamba2")
    model.mixers[1].in_proj = nn.Sequential(model.mixers[1].in_proj)  # type: ignore[assignment]
    with pytest.raises(UserError, match="adapters"):
        quantise(model, "int8")


def test_generate_takes_the_option() -> None:
    command = ["generate", "passkey-tiny", "--prompt", "The grass", "--max-new-tokens", "3"]
    assert CliRunner().invoke(app, [*command, "--weights", "int8"]).exit_code == 0
    refused = CliRunner().invoke(app, [*command, "--weights", "int3"])
    assert isinstance(refused.exception, UserError)
