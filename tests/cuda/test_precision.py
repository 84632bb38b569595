"""No device rounds what a recurrence remembers, whatever autocast and TF32 would do."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from longrnn import load
from longrnn.cells import MIXERS, Edit
from longrnn.models.checkpoint import save_model
from longrnn.ops.backend import Backend, choose
from longrnn.ops.scan import ScanInputs
from longrnn.ops.window import no_tokens, windowed
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
        spec = mixer_spec(kind) | ({"backend": "torch"} if MIXERS[kind].scans else {})
        mixer = build_mixer(spec).to(where)
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


def plain(inputs: ScanInputs, state: Tensor, ops: Backend) -> tuple[Tensor, Any]:
    return ops.scan(inputs, state)


def limited(inputs: ScanInputs, state: Tensor, ops: Backend) -> tuple[Tensor, Any]:
    return ops.limit(inputs, state, torch.full((4,), 3.0, dtype=torch.float64, device=state.device))


def within(inputs: ScanInputs, state: Tensor, ops: Backend) -> tuple[Tensor, Any]:
    return windowed(inputs, no_tokens(inputs, len(state)), 9, ops.scan)


@pytest.mark.parametrize("with_gradients", [False, True])
@pytest.mark.parametrize("run", [plain, limited, within])
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
            y, _ = run(ScanInputs(*given[:5]), given[5], choose(name, given))
        found = [y]
        if with_gradients:
            total = y.square().sum()
            found += torch.autograd.grad(total, given, materialize_grads=True)
        assert {one.dtype for one in found} == {dtype}
        return [one.detach().cpu() for one in found]

    wanted = outcome(torch.float64, torch.device("cpu"), "torch")
    for name in ("torch", "auto"):
        pairs = zip(outcome(torch.float32, device, name), wanted, strict=True)
        for number, (ours, exact) in enumerate(pairs):
            assert_near(ours, exact, 2e-5, str(number))


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
