"""Recurrences in C++ with their gradients, and without gradients under a limit of norms.

All compute in the dtype of the state, float32 or float64, and take and return tensors of any
dtype. The backward pass keeps the inputs, and computes everything else again. It cannot itself be
differentiated.
"""

from typing import Any

import torch
from torch import Tensor

from longrnn.ops.cpu import checks
from longrnn.ops.cpu.checks import tracked
from longrnn.ops.cpu.gradients import Differentiable
from longrnn.ops.cpu.library import call, contiguous_tokens
from longrnn.ops.rows import Rows
from longrnn.ops.scan import channels, definition
from longrnn.ops.scan.definition import FEW, is_entrywise
from longrnn.ops.scan.inputs import ScanInputs
from longrnn.ops.scan.limit import UNLIMITED, limited
from longrnn.ops.scan.recent import Recent
from longrnn.ops.scan.window import windowed


def refusal(inputs: ScanInputs, state: Tensor | None = None, *others: Any) -> str | None:
    """Why the kernels cannot compute this call; None if they can."""
    return checks.refusal((*inputs.tensors(), state))


def scan(
    inputs: ScanInputs, state: Tensor | None = None, *, final: bool = True, erases: bool = False
) -> tuple[Tensor, Tensor]:
    """See `longrnn.ops.scan.definition.scan`."""
    if erases:
        return _recurrence("delta", inputs, state, final=final)
    if channels.suits(inputs):
        return channels.run(inputs, inputs.zero_state() if state is None else state)
    has_few_tokens = inputs.x.shape[1] <= FEW
    if is_entrywise(inputs) and not inputs.has_key_decays and not has_few_tokens:
        return definition.scan(inputs, state, final=final)
    return _recurrence("scan", inputs, state, final=final)


def _recurrence(
    kernel: str,
    inputs: ScanInputs,
    state: Tensor | None,
    *,
    final: bool = True,
    limit: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """A recurrence by the kernel `scan` or `delta`, which read log decays.

    Without gradients it may have a limit; see `longrnn.ops.scan.limit.limited`.
    """
    inputs = inputs.expanded()
    if is_tracked := tracked((*inputs.tensors(), state)):
        state = inputs.zero_state() if state is None else state
        if kernel == "delta" or inputs.has_key_decays:  # gradients of B and C of every head
            inputs = inputs._replace(B=inputs.per_head(inputs.B), C=inputs.per_head(inputs.C))
    x, gain, decay, B, C = inputs
    (b, _, h, p), n = x.shape, B.shape[3]

    def run(**tensors: Tensor) -> tuple[Tensor, Tensor]:
        fields = _fields(**tensors)
        y = fields["x"].new_empty(x.shape)
        after = y.new_empty(b, h, p, n) if final or is_tracked else None
        limits = None if limit is None else limit.where(limit < UNLIMITED, torch.inf).contiguous()
        limit_token = limit.shape[1] if limit is not None and limit.ndim > 1 else 0
        results = {"y": y, "final_state": after}
        call(kernel, y.dtype, **fields, **results, limit=limits, limit_token=limit_token)
        return y, y if after is None else after

    return Differentiable(kernel, _fields, run)(
        x=x, gain=gain, log_decay=decay.step, B=B, C=C, state=state
    )


def _fields(
    *, x: Tensor, gain: Tensor, log_decay: Tensor, B: Tensor, C: Tensor, state: Tensor | None
) -> dict[str, Any]:
    """The arguments that the kernels share."""
    dtype = log_decay.dtype if state is None else state.dtype
    return {
        **dict(zip("bthp", x.shape, strict=True)),
        **dict(zip("gn", B.shape[2:], strict=True)),
        "decays": log_decay.shape[3] if log_decay.ndim == 4 else 1,
        "x": contiguous_tokens(x, dtype),
        "B": contiguous_tokens(B, dtype),
        "C": contiguous_tokens(C, dtype),
        "gain": gain.to(dtype).contiguous(),
        "log_decay": log_decay.to(dtype).contiguous(),
        "state": None if state is None else state.to(dtype).contiguous(),
    }


def windowed_scan(
    inputs: ScanInputs, recent: Recent, w: int, rows: Rows | None = None
) -> tuple[Tensor, Recent]:
    """See `longrnn.ops.scan.window.windowed`."""
    attend = channels.attend if channels.suits(inputs) else None
    return windowed(inputs, recent, w, rows, scan=scan, attend=attend)


def limited_scan(
    inputs: ScanInputs, state: Tensor, limit: Tensor, *, erases: bool = False
) -> tuple[Tensor, Tensor]:
    """See `longrnn.ops.scan.limit.limited`, which computes calls with gradients."""
    if tracked((*inputs.tensors(), state)):
        return limited(inputs, state, limit, scan, erases=erases)
    if not erases and channels.suits(inputs) and limit.ndim == 1:
        return channels.run(inputs, state, limit)
    return _recurrence("delta" if erases else "scan", inputs, state, limit=limit)
