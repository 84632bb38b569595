"""Backends: the operations of a layer that scans, and which implementation of them computes a call.

How a call finds its implementation: a cell holds the name of a backend, `auto` by default, and asks
`choose` once per call, with the tensors that the call reads. `choose` returns a `Backend`, a tuple
of functions, all of which can compute this call. `TORCH` has every operation in differentiable
operations of torch, and defines them. The others are TORCH with some functions replaced: `CPU` by
C++ kernels, and with gradients by those that have a backward pass (`CPU_GRADIENTS`); `FLA` by those
of flash-linear-attention on a GPU; and `MAMBA_SSM` by those of mamba-ssm, for layers without edits.
`auto` takes the first of these that covers the device, the dtypes and the need of gradients, and
TORCH otherwise; a backend that is named is used or refused. A layer that is edited or packed is
composed from `conv`, `scan` or `limit`, and `gate`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

from torch import Tensor

from longrnn.errors import UserError, nearest
from longrnn.ops import cpu, gpu, limit, norm
from longrnn.ops.conv import definition as conv
from longrnn.ops.delta import definition as delta
from longrnn.ops.mamba2_layer import definition as mamba2
from longrnn.ops.scan import definition as scan


class Backend(NamedTuple):
    """The operations of a layer that scans.

    Attributes:
        scan: `longrnn.ops.scan.definition.scan`.
        conv: `longrnn.ops.conv.definition.conv`.
        gate: `longrnn.ops.norm.gated_rms_norm`.
        limit: `longrnn.ops.limit.limited`, with `scan` as the plain recurrence.
        cell: (projected, weights, state) → (y, state): `mamba2.cell` of all of them.
        delta: `longrnn.ops.delta.definition.delta`.
        recurrence: takes the place of `scan` in `cell`, for kernels that need dt and A; or None.
    """

    scan: Callable[..., tuple[Tensor, Tensor]]
    conv: Callable[..., tuple[Tensor, Tensor]]
    gate: Callable[..., Tensor]
    limit: Callable[..., tuple[Tensor, Tensor]]
    cell: Callable[..., tuple[Tensor, mamba2.Mamba2State]]
    delta: Callable[..., tuple[Tensor, Tensor]] = delta.delta
    recurrence: mamba2.Recurrence | None = None

    def composed(self) -> Backend:
        """The backend whose `cell` is composed from its other operations."""
        return self._replace(cell=partial(mamba2.cell, self, recurrence=self.recurrence))

    def with_delta(self) -> Backend:
        """The backend whose recurrence is the gated delta rule."""
        return self._replace(scan=self.delta, limit=partial(delta.limited, plain=self.delta))


def _with_scan(scan: Callable[..., tuple[Tensor, Tensor]]) -> Backend:
    """TORCH with another recurrence."""
    return TORCH._replace(scan=scan, limit=partial(limit.limited, plain=scan)).composed()


TORCH = Backend(
    scan.scan, conv.conv, norm.gated_rms_norm, limit.limited, cell=NotImplemented
).composed()
CPU = Backend(cpu.scan, cpu.conv, cpu.gate, cpu.limit, cpu.cell, cpu.delta)
CPU_GRADIENTS = _with_scan(cpu.scan)._replace(cell=cpu.cell)
FLA = _with_scan(gpu.fla_scan)._replace(delta=gpu.fla_delta)
MAMBA_SSM = TORCH._replace(recurrence=gpu.mamba_ssm_recurrence).composed()

BACKENDS = {"torch": TORCH, "cpu": CPU, "fla": FLA, "mamba_ssm": MAMBA_SSM}
"""Backends by name, in the order in which documents list them."""


def choose(name: str, tensors: Sequence[Tensor | None]) -> Backend:
    """The backend of one call.

    Args:
        name: `auto`, or a name in `BACKENDS`.
        tensors: everything that the call reads.

    Raises:
        UserError: the named backend cannot compute this call.
    """
    if name == "torch":
        return TORCH
    kinds = ["cpu", "fla", "mamba_ssm"] if name == "auto" else [name]
    for kind in kinds:
        reason = REFUSALS[kind](tensors)
        if reason is None:
            gradients = kind == "cpu" and cpu.tracked(tensors)
            return CPU_GRADIENTS if gradients else BACKENDS[kind]
        if name != "auto":
            raise UserError(
                f"the backend {name} cannot compute this call: {reason}; use backend='auto' for "
                "another one"
            )
    return TORCH


REFUSALS = {"cpu": cpu.refusal, "fla": gpu.fla_refusal, "mamba_ssm": gpu.mamba_ssm_refusal}


def check_name(name: str, lacking: Sequence[str] = ()) -> None:
    """Raises a `UserError` for a name that is neither `auto` nor in `BACKENDS`, or is `lacking`."""
    if name in lacking:
        raise UserError(f"the backend {name} does not have this cell: use backend='auto'")
    if name != "auto" and name not in BACKENDS:
        raise UserError(f"unknown backend {name!r}: {nearest(name, ['auto', *BACKENDS])}")
