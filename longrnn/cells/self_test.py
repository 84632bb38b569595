"""A short test of a Mamba-2 layer on this machine, with each backend."""

from __future__ import annotations

import time
from typing import NamedTuple

import torch
from torch import Tensor

from longrnn.cells.mamba2 import Mamba2
from longrnn.state import leaves

WIDTH, TOKENS, TIMED = 64, 150, 2048
# Of float32 relative to float64; the kernels of GPU libraries add up in another order.
TOLERANCE = {"torch": 1e-4, "cpu": 1e-4, "fla": 1e-3, "mamba_ssm": 1e-2}


class Finding(NamedTuple):
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


def self_test(backend: str, device: str | torch.device = "cpu") -> Finding:
    """Compares a layer in float32 with the same layer in float64: many tokens, then a single one.

    Raises:
        UserError: the backend does not run here.
    """
    wanted = _results(_layer("torch").double())
    layer = _layer(backend).to(device)
    pairs = zip(_results(layer), wanted, strict=True)
    error = max(_relative(ours.cpu().double(), exact) for ours, exact in pairs)
    with torch.no_grad():
        x, state = torch.randn(1, TIMED, WIDTH, device=device), layer.init_state(1)
        seconds = []
        for _ in range(3):
            start = time.perf_counter()
            layer(x, state)[0].sum().item()
            seconds.append(time.perf_counter() - start)
    return Finding(error, error <= TOLERANCE[backend], min(seconds))


def _layer(backend: str) -> Mamba2:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Mamba2(WIDTH, WIDTH, d_state=16, head_dim=16, backend=backend)


def _results(layer: Mamba2) -> list[Tensor]:
    """Outputs and states without gradients, and the gradients of all weights and of the input."""
    weight = layer.D
    randomness = torch.Generator().manual_seed(1)
    x = torch.randn(2, TOKENS + 1, WIDTH, generator=randomness, dtype=torch.float64).to(weight)
    with torch.no_grad():
        y, state = layer(x[:, :TOKENS], layer.init_state(2))
        last, state = layer(x[:, TOKENS:], state)
    x.requires_grad_()
    out, after = layer(x, layer.init_state(2))
    loss = out.square().mean() + after.ssm.square().mean()
    inputs = [x, *layer.parameters()]
    return [y, last, *(leaf for _, leaf in leaves(state)), *torch.autograd.grad(loss, inputs)]


def _relative(ours: Tensor, exact: Tensor) -> float:
    return float((ours - exact).abs().max() / exact.abs().max())
