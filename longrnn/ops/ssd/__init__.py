"""The state-space dual recurrence h_t = exp(log_decay_t) h_{t-1} + gain_t x_t B_t^T, y_t = h_t C_t.

The modules `chunked`, `native`, `reference` and `triton` implement
`ssd(inputs, state) -> (y, final_state)` with the same signature. The option `backend` of a mixer
selects one of them; with `auto` each call selects by the device of its tensors.
"""

from __future__ import annotations

import torch
from torch import Tensor

from longrnn.errors import UserError, nearest
from longrnn.ops import native as cpu_kernels
from longrnn.ops import triton as gpu_kernels
from longrnn.ops.ssd import chunked, mamba_ssm, native, reference, triton
from longrnn.ops.ssd.base import SSD, ScanInputs

BACKENDS: dict[str, SSD] = {"reference": reference.ssd, "chunked": chunked.ssd}
if cpu_kernels.available():
    BACKENDS["native"] = native.ssd
if gpu_kernels.available():
    BACKENDS["triton"] = triton.ssd
# The backend with kernels of this project for each type of device; `chunked` runs on all of them.
KERNELS = {"cpu": "native", "cuda": "triton"}
# Backends that compute a part of `ScanInputs` and refuse the rest; `auto` selects none of them.
PARTIAL: dict[str, SSD] = {"mamba_ssm": mamba_ssm.ssd}

__all__ = ["BACKENDS", "KERNELS", "PARTIAL", "SSD", "ScanInputs", "on_device", "resolve", "select"]


def resolve(backend: str, device: str = "cpu") -> str:
    """The name of the backend that runs.

    Args:
        backend: a name in BACKENDS, or `auto` for `native` on a CPU where it was compiled, else
            `chunked`: no GPU has run the Triton kernels yet.
        device: type of the device of the tensors: `cpu`, `cuda`, …

    Raises:
        UserError: unknown backend, or one that this machine cannot run.
    """
    if backend == "auto":
        return "native" if device == "cpu" and "native" in BACKENDS else "chunked"
    if backend in PARTIAL:
        mamba_ssm.combined()  # refuses a missing package
        return backend
    if backend not in BACKENDS:
        missing = {"native": cpu_kernels.missing, "triton": gpu_kernels.missing}
        if backend in missing:
            raise UserError(f"{missing[backend]()}; or leave out backend")
        known = [*BACKENDS, *PARTIAL, "auto"]
        raise UserError(f"unknown ssd backend {backend!r}: {nearest(backend, known)}")
    return backend


def select(backend: str) -> SSD:
    """The implementation with a name; for `auto` one that selects by the device of each call.

    Raises:
        UserError: see `resolve`.
    """
    if backend == "auto":
        return _automatic
    return {**BACKENDS, **PARTIAL}[resolve(backend)]


def on_device(ssd: SSD, device: torch.device) -> SSD:
    """The implementation that computes calls on a device: of `auto` the one that it selects.

    A mitigation that has kernels of its own for a backend knows the backend by it.
    """
    return BACKENDS[resolve("auto", device.type)] if ssd is _automatic else ssd


def _automatic(inputs: ScanInputs, state: Tensor) -> tuple[Tensor, Tensor]:
    return BACKENDS[resolve("auto", inputs.x.device.type)](inputs, state)
