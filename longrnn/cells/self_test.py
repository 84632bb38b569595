"""A short test of layers on this machine, with every implementation of their operations."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from longrnn.cells.gated_deltanet import GatedDeltaNet
from longrnn.cells.kda import KDA
from longrnn.cells.mamba import Mamba
from longrnn.cells.mamba2 import Mamba2
from longrnn.cells.scanning import ScanningCell
from longrnn.state import leaves

WIDTH, TESTED_TOKENS, TIMED = 64, 150, 2048


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


def _cell(kind: type[ScanningCell], backend: str, **sizes: int) -> ScanningCell:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return kind(WIDTH, WIDTH, backend=backend, **sizes)


# Small cells by name; each is tested with every implementation of its recurrence or layer.
TESTED_CELLS: dict[str, Callable[[str], ScanningCell]] = {
    "Mamba-2": partial(_cell, Mamba2, d_state=16, head_dim=16),
    "Mamba-1": partial(_cell, Mamba, d_state=8),
    "Gated DeltaNet": partial(_cell, GatedDeltaNet, key_dim=16, value_dim=16),
    "Kimi Delta Attention": partial(_cell, KDA, key_dim=16, value_dim=16),
}


def backends(name: str) -> list[str]:
    """The backends of a cell of `TESTED_CELLS`."""
    return TESTED_CELLS[name]("auto").backends()


def self_test(
    name: str,
    backend: str,
    device: str | torch.device = "cpu",
    dtype: torch.dtype = torch.float32,
) -> SelfTestResult:
    """Compares a layer with the same layer in float64: many tokens, then a single token.

    Args:
        name: of a cell in `TESTED_CELLS`.
        backend: one of `backends(name)`.
        device: that of the layer.
        dtype: of its weights and input; the tolerance is that of float32.

    Raises:
        UserError: the backend does not run here.
    """
    expected = _results(TESTED_CELLS[name]("torch").to(dtype).double())
    layer = TESTED_CELLS[name](backend).to(device, dtype)
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
    tolerance = max(each.tolerance for each in layer.implementations() if each.name == backend)
    return SelfTestResult(error, error <= tolerance, min(seconds))


def _results(layer: ScanningCell) -> list[Tensor]:
    """Outputs and states without gradients, and the gradients of all weights and of the input."""
    weight = layer.get_parameter(layer.wide_weights[0])
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
    loss = 1024 * (out.square().mean() + after.ssm.square().mean())
    inputs = [x, *layer.parameters()]
    return [y, last, *(leaf for _, leaf in leaves(state)), *torch.autograd.grad(loss, inputs)]


def _relative(ours: Tensor, exact: Tensor) -> float:
    return float((ours - exact).abs().max() / exact.abs().max())
