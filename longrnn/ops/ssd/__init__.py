"""The state-space dual recurrence h_t = exp(log_decay_t) h_{t-1} + gain_t x_t B_t^T, y_t = h_t C_t.

The modules `chunked`, `native`, `reference` and `triton` implement
`ssd(inputs, state) -> (y, final_state)` with the same signature. The option `backend` of a mixer
selects one of them; with `auto` each call selects by the device of its tensors.
"""

from __future__ import annotations

from torch import Tensor

from longrnn.errors import UserError, nearest
from longrnn.ops import native as cpu_kernels
from longrnn.ops import triton as gpu_kernels
from longrnn.ops.ssd import chunked, native, reference, triton
from longrnn.ops.ssd.base import SSD, ScanInputs

BACKENDS: dict[str, SSD] = {"reference": reference.ssd, "chunked": chunked.ssd}
if cpu_kernels.available():
    BACKENDS["native"] = native.ssd
if gpu_kernels.available():
    BACKENDS["triton"] = triton.ssd
# The backend with compiled kernels for each type of device; `chunked` runs on all of them.
KERNELS = {"cpu": "native", "cuda": "triton"}

__all__ = ["BACKENDS", "KERNELS", "SSD", "ScanInputs", "resolve", "runs_triton", "select"]


def resolve(backend: str, device: str = "cpu") -> str:
    """The name of the backend that runs.

    Args:
        backend: a name in BACKENDS, or `auto` for the fastest one on this machine.
        device: type of the device of the tensors: `cpu`, `cuda`, …

    Raises:
        UserError: unknown backend, or one that this machine cannot run.
    """
    if backend == "auto":
        fastest = KERNELS.get(device)
        return fastest if fastest in BACKENDS else "chunked"
    if backend not in BACKENDS:
        missing = {"native": cpu_kernels.missing, "triton": gpu_kernels.missing}
        if backend in missing:
            raise UserError(f"{missing[backend]()}; or leave out backend")
        raise UserError(f"unknown ssd backend {backend!r}: {nearest(backend, [*BACKENDS, 'auto'])}")
    return backend


def select(backend: str) -> SSD:
    """The implementation with a name; for `auto` one that selects by the device of each call.

    Raises:
        UserError: see `resolve`.
    """
    return _automatic if backend == "auto" else BACKENDS[resolve(backend)]


def runs_triton(ssd: SSD, inputs: ScanInputs, state: Tensor) -> bool:
    """Whether an implementation computes these tensors, without gradients, in Triton kernels."""
    if ssd is _automatic:
        ssd = BACKENDS[resolve("auto", inputs.x.device.type)]
    return ssd is triton.ssd and triton.runs_kernels(inputs, state)


def _automatic(inputs: ScanInputs, state: Tensor) -> tuple[Tensor, Tensor]:
    return BACKENDS[resolve("auto", inputs.x.device.type)](inputs, state)
