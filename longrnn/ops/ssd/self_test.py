"""A short test of a backend on this machine: its error and its speed."""

from __future__ import annotations

from statistics import median
from time import perf_counter, process_time
from typing import NamedTuple

import torch
from torch import Tensor

from longrnn.ops.ssd import BACKENDS, ScanInputs

# Largest error that passes, relative to the largest entry.
TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-10}
SIZES = (1, 200, 4, 32, 1, 64)  # b, t, h, p, g, n
REPEATS = 5


class Finding(NamedTuple):
    """What a self-test found.

    Attributes:
        error: the largest relative error of outputs, state and gradients against `reference` in
            float64.
        passed: whether it is within TOLERANCE.
        seconds: time of one call without gradients, in float32; processor time on a CPU.
    """

    error: float
    passed: bool
    seconds: float


def self_test(backend: str, device: str | torch.device = "cpu") -> Finding:
    """Compare a backend with a loop over tokens, in float32 and float64; takes about a second."""
    wanted = _results("reference", torch.float64, "cpu")
    error, passed = 0.0, True
    for dtype, tolerance in TOLERANCE.items():
        found = _results(backend, dtype, device)
        for ours, exact in zip(found, wanted, strict=True):
            one = float((ours.cpu().double() - exact).abs().max() / exact.abs().max())
            passed &= one <= tolerance  # a NaN does not pass
            error = max(error, one) if dtype == torch.float32 else error
    return Finding(error, passed, _seconds(backend, device))


def _draw(dtype: torch.dtype, device: str | torch.device) -> tuple[ScanInputs, Tensor]:
    b, t, h, p, g, n = SIZES
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(device, dtype)

    decay = -3 * torch.rand((b, t, h), generator=generator, dtype=torch.float64) ** 4
    inputs = ScanInputs(
        x=normal(b, t, h, p),
        gain=normal(b, t, h),
        log_decay=decay.to(device, dtype),
        B=normal(b, t, g, n),
        C=normal(b, t, g, n),
    )
    return inputs, normal(b, h, p, n)


def _results(backend: str, dtype: torch.dtype, device: str | torch.device) -> list[Tensor]:
    """Output and final state without gradients, and gradients of their sums of squares."""
    inputs, state = _draw(dtype, device)
    with torch.no_grad():
        y, final = BACKENDS[backend](inputs, state)
    leaves = [tensor.requires_grad_() for tensor in (*inputs, state)]
    outputs = BACKENDS[backend](ScanInputs(*leaves[:5]), leaves[5])
    loss = torch.stack([output.square().mean() for output in outputs]).sum()
    return [y, final, *torch.autograd.grad(loss, leaves)]


@torch.no_grad()
def _seconds(backend: str, device: str | torch.device) -> float:
    inputs, state = _draw(torch.float32, device)
    clock = process_time if torch.device(device).type == "cpu" else perf_counter
    times = []
    for _ in range(REPEATS):
        before = clock()
        BACKENDS[backend](inputs, state)[0].sum().item()
        times.append(clock() - before)
    return median(times)
