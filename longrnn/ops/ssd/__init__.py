"""The state-space dual recurrence h_t = exp(log_decay_t) h_{t-1} + gain_t x_t B_t^T, y_t = h_t C_t.

The modules `chunked`, `native` and `reference` implement `ssd(inputs, state) -> (y, final_state)`
with the same signature. The option `backend` selects one of them when a mixer is built.
"""

from __future__ import annotations

from longrnn.errors import UserError, nearest
from longrnn.ops import native as kernels
from longrnn.ops.ssd import chunked, mamba_ssm, native, reference
from longrnn.ops.ssd.base import SSD, ScanInputs

BACKENDS: dict[str, SSD] = {"reference": reference.ssd, "chunked": chunked.ssd}
if kernels.available():
    BACKENDS["native"] = native.ssd
# Backends that compute a part of `ScanInputs` and refuse the rest; `auto` selects none of them.
PARTIAL: dict[str, SSD] = {"mamba_ssm": mamba_ssm.ssd}

KNOWN = (*BACKENDS, *PARTIAL, "auto")

__all__ = ["BACKENDS", "PARTIAL", "SSD", "ScanInputs", "resolve", "select"]


def resolve(backend: str) -> str:
    """The name of a backend; `auto` selects the fastest one that runs on this machine.

    Raises:
        UserError: unknown backend, or one that this machine cannot run.
    """
    if backend == "auto":
        return "native" if "native" in BACKENDS else "chunked"
    if backend in PARTIAL:
        mamba_ssm.combined()  # refuses a missing package
        return backend
    if backend == "native" and backend not in BACKENDS:
        raise UserError(f"{kernels.missing()}; or leave out backend")
    if backend not in BACKENDS:
        raise UserError(f"unknown ssd backend {backend!r}: {nearest(backend, KNOWN)}")
    return backend


def select(backend: str) -> SSD:
    """The implementation with a name.

    Raises:
        UserError: see `resolve`.
    """
    return {**BACKENDS, **PARTIAL}[resolve(backend)]
