"""A short test of a backend on this machine: its error and its speed."""

from __future__ import annotations

from statistics import median
from time import perf_counter, process_time
from typing import NamedTuple

import torch
from torch import Tensor

from longrnn.ops.ssd import BACKENDS, PARTIAL, ScanInputs

# Largest error that passes, relative to the largest entry.
TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-10}
# That of PARTIAL: kernels of other packages, which round float32 factors to 11 bits (TF32).
PARTIAL_TOLERANCE = {torch.float32: 1e-2}
SIZES = (1, 200, 4, 32, 1, 64)  # b, t, h, p, g, n
REPEATS = 5


class Finding(NamedTuple):
    """What a self-test found.

    Attributes:
        error: the largest relative error of outputs, state and gradients against `reference` in
            float64.
        passed: whether it is within the tolerance.
        seconds: time of one call without gradients, in float32; processor time on a CPU.
    """

    error: float
    passed: bool
    seconds: float


def self_test(backend: str, device: str | torch.device = "cpu") -> Finding:
    """Compare a backend with a loop over tokens, in each dtype that it computes.

    Takes about a second, and longer where kernels are compiled first.
    """
    tolerances = PARTIAL_TOLERANCE if backend in PARTIAL else TOLERANCE
    plain = backend in PARTIAL
    wanted = _results("reference", torch.float64, "cpu", plain)
    error, passed = 0.0, True
    for dtype, tolerance in tolerances.items():
        found = _results(backend, dtype, device, plain)
        for ours, exact in zip(found, wanted, strict=True):
            one = relative_error(ours, exact)
            passed &= one <= tolerance  # a NaN does not pass
            error = max(error, one) if dtype == torch.float32 else error
    return Finding(error, passed, _seconds(backend, device, plain))


def relative_error(found: Tensor, exact: Tensor) -> float:
    """The largest difference, relative to the largest entry of `exact`."""
    return float((found.detach().cpu().double() - exact).abs().max() / exact.abs().max())


def _draw(dtype: torch.dtype, device: str | torch.device, plain: bool) -> tuple[ScanInputs, Tensor]:
    """Inputs and a state; `plain`: with decays of a Mamba-2 without mitigations, gain · A."""
    b, t, h, p, g, n = SIZES
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    def uniform(*shape: int) -> Tensor:
        return torch.rand(shape, generator=generator, dtype=torch.float64)

    decay = -3 * uniform(b, t, h) ** 4
    drawn = ScanInputs(
        normal(b, t, h, p), normal(b, t, h), decay, normal(b, t, g, n), normal(b, t, g, n)
    )
    state = normal(b, h, p, n).to(device, dtype)
    if plain:
        drawn = drawn._replace(gain=0.01 + 0.2 * uniform(b, t, h))
    inputs = ScanInputs(*(tensor.to(device, dtype) for tensor in drawn))
    if plain:
        # In the dtype of the test, so that log_decay is gain · A to one rounding.
        inputs = inputs._replace(log_decay=inputs.gain * -(1 + 7 * uniform(h)).to(inputs.gain))
    return inputs, state


def _results(
    backend: str, dtype: torch.dtype, device: str | torch.device, plain: bool
) -> list[Tensor]:
    """Output and final state without gradients, and gradients of their sums of squares."""
    inputs, state = _draw(dtype, device, plain)
    ssd = {**BACKENDS, **PARTIAL}[backend]
    with torch.no_grad():
        y, final = ssd(inputs, state)
    leaves = [tensor.requires_grad_() for tensor in (*inputs, state)]
    outputs = ssd(ScanInputs(*leaves[:5]), leaves[5])
    loss = torch.stack([output.square().mean() for output in outputs]).sum()
    return [y, final, *torch.autograd.grad(loss, leaves)]


@torch.no_grad()
def _seconds(backend: str, device: str | torch.device, plain: bool) -> float:
    inputs, state = _draw(torch.float32, device, plain)
    ssd = {**BACKENDS, **PARTIAL}[backend]
    clock = process_time if torch.device(device).type == "cpu" else perf_counter
    times = []
    for _ in range(REPEATS):
        before = clock()
        ssd(inputs, state)[0].sum().item()
        times.append(clock() - before)
    return median(times)
