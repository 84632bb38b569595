"""No device rounds what a recurrence remembers, whatever autocast and TF32 would do."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from longrnn.ops.cross_entropy import token_cross_entropy
from longrnn.ops.ssd import BACKENDS, ScanInputs, resolve
from longrnn.ops.ssd.rescale import rescaled_ssd
from longrnn.ops.ssd.window import windowed_ssd
from longrnn.ops.ssd.window_carry import init_carry
from torch import Tensor

from longrnn import load
from longrnn.cells import MIXERS, Edit
from longrnn.models.checkpoint import save_model
from longrnn.ops.conv import causal_conv
from longrnn.state import leaves, tree_map
from tests.contracts.builders import (
    D_MODEL,
    assert_near,
    build_mixer,
    build_model,
    generator,
    mixer_spec,
    random_tokens,
    random_tree,
)

NARROW = torch.bfloat16


@pytest.mark.parametrize("kind", list(MIXERS))
def test_float32_cells_are_not_rounded_to_tf32(
    kind: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """cuDNN would round the factors of products to 11 bits, an error of some 1e-4 at this width."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", True)
    if hasattr(torch.backends.cudnn, "rnn"):
        monkeypatch.setattr(torch.backends.cudnn, "fp32_precision", "tf32")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        mixer = MIXERS.build({"kind": kind}, 128, 128).double()
    x = torch.randn(2, 20, 128, generator=generator(0), dtype=torch.float64)
    start = random_tree(mixer.init_state(2), 1)

    def outcome(dtype: torch.dtype, where: torch.device) -> list[Tensor]:
        cell = mixer.to(where, dtype)
        state = tree_map(lambda leaf: leaf.to(where, dtype), start)
        y, after = cell(x.to(where, dtype), state)
        gradients = torch.autograd.grad(y.square().sum(), list(cell.parameters()))
        return [one.detach().cpu() for one in (y, *(leaf for _, leaf in leaves(after)), *gradients)]

    wanted = outcome(torch.float64, torch.device("cpu"))
    for ours, exact in zip(outcome(torch.float32, device), wanted, strict=True):
        assert_near(ours, exact, 3e-5)


@pytest.mark.parametrize("kind", list(MIXERS))
def test_second_derivatives(kind: str, device: torch.device) -> None:
    """The gradient of a gradient's norm, as the diagnostics of gradients need it."""

    def outcome(where: torch.device) -> list[Tensor]:
        mixer = build_mixer(mixer_spec(kind)).to(where)
        x = random_tree(torch.empty(2, 7, D_MODEL + 2, dtype=torch.float64), 0).to(where)
        state = tree_map(lambda leaf: leaf.to(where), random_tree(mixer.init_state(2), 1))
        x.requires_grad_()
        # An edit, because cuDNN has no second derivatives.
        y, _ = mixer(x, state, Edit())
        (first,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
        second = torch.autograd.grad(first.square().sum(), [x, *mixer.parameters()])
        return [one.detach().cpu() for one in (first, *second)]

    wanted = outcome(torch.device("cpu"))
    for ours, exact in zip(outcome(device), wanted, strict=True):
        assert_near(ours, exact, 1e-9)


def draw(time: int = 70) -> tuple[ScanInputs, Tensor]:
    """Inputs of a recurrence in float64, with states that reach a limit of 3."""
    randomness = generator(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(2, *shape, generator=randomness, dtype=torch.float64)

    gain, log_decay = 0.3 * normal(time, 4).abs(), -0.1 * normal(time, 4).square()
    inputs = ScanInputs(
        normal(time, 4, 8), gain, log_decay, normal(time, 2, 16), normal(time, 2, 16)
    )
    return inputs, normal(4, 8, 16)


def plain(inputs: ScanInputs, state: Tensor, ssd: Any) -> tuple[Tensor, Any]:
    return ssd(inputs, state)


def limited(inputs: ScanInputs, state: Tensor, ssd: Any) -> tuple[Tensor, Any]:
    limit = torch.full((4,), 3.0, dtype=torch.float64, device=state.device)
    return rescaled_ssd(inputs, state, limit, ssd)


def windowed(inputs: ScanInputs, state: Tensor, ssd: Any) -> tuple[Tensor, Any]:
    like = ScanInputs(*(tensor[0, :1] for tensor in inputs))
    carry = init_carry(like, state, 9)
    return windowed_ssd(inputs, carry, 9, ssd)[:2]


@pytest.mark.parametrize("with_gradients", [False, True])
@pytest.mark.parametrize("run", [plain, limited, windowed])
def test_autocast_does_not_round_a_recurrence(
    run: Any, with_gradients: bool, device: torch.device
) -> None:
    """The state, its limit and its window are those of float32, and so are all gradients."""
    drawn, start = draw()

    def outcome(dtype: torch.dtype, where: torch.device, name: str) -> list[Tensor]:
        given = [tensor.to(where, dtype) for tensor in (*drawn, start)]
        for tensor in given if with_gradients else []:
            tensor.requires_grad_()
        with torch.autocast(where.type, NARROW, enabled=dtype == torch.float32):
            y, _ = run(ScanInputs(*given[:5]), given[5], BACKENDS[name])
        found = [y]
        if with_gradients:
            total = y.square().sum()
            found += torch.autograd.grad(total, given, materialize_grads=True)
        assert {one.dtype for one in found} == {dtype}
        return [one.detach().cpu() for one in found]

    wanted = outcome(torch.float64, torch.device("cpu"), "reference")
    found = outcome(torch.float32, device, resolve("auto", device.type))
    for number, (ours, exact) in enumerate(zip(found, wanted, strict=True)):
        assert_near(ours, exact, 2e-5, str(number))


def test_a_convolution_in_bfloat16_is_rounded_once(device: torch.device) -> None:
    """Its sums are float32."""
    randomness = generator(0)
    shapes = ((2, 50, 24), (24, 4), (24,), (2, 3, 24))
    drawn = [torch.randn(shape, generator=randomness).to(NARROW) for shape in shapes]
    exact, _ = causal_conv(*(one.double() for one in drawn), activation=True)
    found, _ = causal_conv(*(one.to(device) for one in drawn), activation=True)
    assert found.dtype == NARROW
    assert ((found.cpu().double() - exact).abs() <= 2**-8 * exact.abs() + 1e-6).all()


def test_logits_are_not_rounded_under_autocast(device: torch.device) -> None:
    """Factors have 8 bits, and the loss is that of their exact products."""
    randomness = generator(0)
    hidden, head = (
        torch.randn(shape, generator=randomness).to(NARROW).float()
        for shape in ((40, 32), (90, 32))
    )
    targets = torch.randint(90, (40,), generator=randomness)
    exact, best = token_cross_entropy(hidden.double(), head.double(), targets)
    with torch.autocast(device.type, NARROW):
        found, ours = token_cross_entropy(hidden.to(device), head.to(device), targets.to(device))
    assert_near(found.cpu(), exact, 1e-5)
    assert torch.equal(ours.cpu(), best)


def test_rates_stay_float32_in_a_model_that_is_loaded_in_bfloat16(
    device: torch.device, tmp_path: Any
) -> None:
    """A_log, dt_bias and D: a rate of 8 bits would change how long a head remembers."""
    model = build_model("mamba2", dtype=torch.float32)
    save_model(model, tmp_path)
    narrow = load(str(tmp_path), device=str(device), dtype=NARROW)
    wide = dict(model.named_parameters())
    for name, weight in narrow.named_parameters():  # type: ignore[attr-defined]
        kept = name.rpartition(".")[2] in ("A_log", "dt_bias", "D")
        assert weight.dtype == (torch.float32 if kept else NARROW), name
        assert weight.device.type == device.type
        assert not kept or torch.equal(weight.cpu(), wide[name])
    state = narrow(random_tokens(2, 30).to(device)).state
    assert {leaf.dtype for name, leaf in leaves(state.layers) if "ssm" in name} == {torch.float32}
