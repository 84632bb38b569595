"""A short test of layers on this machine, with every implementation of their operations."""

import time
from typing import Any, NamedTuple

import torch
from torch import Tensor

from longrnn.cells.base import MIXERS, Cell
from longrnn.cells.scanning import ScanningCell
from longrnn.state import leaves

WIDTH, TESTED_TOKENS, TIMED = 64, 150, 2048
# Of cells whose defaults are large.
SMALL_SIZES: dict[str, dict[str, int]] = {
    "mamba": {"d_state": 8},
    "mamba2": {"d_state": 16, "head_dim": 16},
    "mamba3": {"d_state": 16, "head_dim": 16},
    "gated_deltanet": {"key_dim": 16, "value_dim": 16},
    "kda": {"key_dim": 16, "value_dim": 16},
}
# Of a cell without a choice of backends: kernels of torch, or C++.
AUTO, TOLERANCE = "auto", 1e-4


class SelfTestResult(NamedTuple):
    """What a self-test of a backend found.

    Attributes:
        error: the largest relative error of outputs, states and gradients against float64 on the
            CPU.
        passed: whether it is within the tolerance; a NaN does not pass.
        seconds: of TIMED tokens without gradients.
    """

    error: float
    passed: bool
    seconds: float


def _cell(name: str, backend: str) -> Cell:
    kind = MIXERS[name]
    options: dict[str, Any] = {**SMALL_SIZES.get(name, {})}
    if issubclass(kind, ScanningCell):
        options["backend"] = backend
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return kind(WIDTH, WIDTH, **options)


def backends(name: str) -> list[str]:
    """The backends of a cell of `MIXERS`; of one without a choice of them, `auto`."""
    kind = MIXERS[name]
    return kind.backends() if issubclass(kind, ScanningCell) else [AUTO]


def self_test(
    name: str,
    backend: str,
    device: str | torch.device = "cpu",
    dtype: torch.dtype = torch.float32,
) -> SelfTestResult:
    """Compares a layer with the same layer in float64: many tokens, then a single token.

    Args:
        name: of a cell in `MIXERS`.
        backend: one of `backends(name)`.
        device: that of the layer.
        dtype: of its weights and input; the tolerance is that of float32.

    Raises:
        UserError: the backend does not run here.
    """
    definition = _cell(name, "torch").to(dtype).double()
    definition.recurrence.register_forward_hook(lambda *_: None)  # kernels pass hooks by
    expected = _results(definition)
    layer = _cell(name, backend).to(device, dtype)
    pairs = zip(_results(layer), expected, strict=True)
    error = max(_relative(ours.cpu().double(), exact) for ours, exact in pairs)
    with torch.no_grad():
        x = torch.randn(1, TIMED, WIDTH, device=device, dtype=dtype)
        state = layer.init_state(1)
        seconds = []
        for _ in range(3):
            start = time.perf_counter()
            layer(x, state)[0].sum().item()
            seconds.append(time.perf_counter() - start)
    tolerance = TOLERANCE
    if isinstance(layer, ScanningCell):
        implementations = layer.operation.implementations
        tolerance = max(each.tolerance for each in implementations if each.name == backend)
    return SelfTestResult(error, error <= tolerance, min(seconds))


def _results(layer: Cell) -> list[Tensor]:
    """Outputs and states without gradients, and the gradients of all weights and of the input."""
    weight = layer.get_parameter([*layer.wide_weights, *dict(layer.named_parameters())][0])
    randomness = torch.Generator().manual_seed(1)
    x = torch.randn(2, TESTED_TOKENS + 1, WIDTH, generator=randomness, dtype=torch.float64).to(
        weight
    )
    with torch.no_grad():
        y, state = layer(x[:, :TESTED_TOKENS], layer.init_state(2))
        last, state = layer(x[:, TESTED_TOKENS:], state)
    x.requires_grad_()
    out, after = layer(x, layer.init_state(2))
    # As a gradient scaler does, so that small gradients in float16 are not rounded to 0.
    loss = 1024 * (out.square().mean() + layer.memory(after).square().mean())
    inputs = [x, *layer.parameters()]
    return [y, last, *(leaf for _, leaf in leaves(state)), *torch.autograd.grad(loss, inputs)]


def _relative(ours: Tensor, exact: Tensor) -> float:
    return float((ours - exact).abs().max() / exact.abs().max())
