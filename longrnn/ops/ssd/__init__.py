"""The state-space dual recurrence h_t = exp(log_decay_t) h_{t-1} + gain_t x_t B_t^T, y_t = h_t C_t.

The modules `chunked`, `native` and `reference` implement `ssd(inputs, state) -> (y, final_state)`
with the same signature. The option `backend` selects one of them when a mixer is built.
"""

from __future__ import annotations

from longrnn.errors import UserError, nearest
from longrnn.ops import native as kernels
from longrnn.ops.ssd import chunked, native, reference
from longrnn.ops.ssd.base import SSD, ScanInputs

BACKENDS: dict[str, SSD] = {"reference": reference.ssd, "chunked": chunked.ssd}
if kernels.available():
    BACKENDS["native"] = native.ssd

__all__ = ["BACKENDS", "SSD", "ScanInputs", "resolve"]


def resolve(backend: str) -> str:
    """The name of a backend; `auto` selects the fastest one that runs on this machine.

    Raises:
        UserError: unknown backend.
    """
    if backend == "auto":
        return "native" if "native" in BACKENDS else "chunked"
    if backend == "native" and backend not in BACKENDS:
        raise UserError(f"{kernels.missing()}; or leave out backend")
    if backend not in BACKENDS:
        raise UserError(f"unknown ssd backend {backend!r}: {nearest(backend, [*BACKENDS, 'auto'])}")
    return backend
