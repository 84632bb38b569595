"""Recurrences in C++ with their gradients, and without gradients under a limit of norms.

All compute in the dtype of the state, float32 or float64, and take and return tensors of any
dtype. The backward pass keeps the inputs, and computes everything else again. It cannot itself be
differentiated.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from longrnn.ops.cpu import checks
from longrnn.ops.cpu.checks import refuse_second_derivatives, tracked
from longrnn.ops.cpu.library import call
from longrnn.ops.rows import Rows
from longrnn.ops.scan import channels, definition
from longrnn.ops.scan.definition import FEW, is_entrywise, reversible
from longrnn.ops.scan.inputs import Decay, ScanInputs
from longrnn.ops.scan.limit import UNLIMITED, limited
from longrnn.ops.scan.recent import Recent
from longrnn.ops.scan.window import windowed


def refusal(inputs: ScanInputs, state: Tensor | None = None, *others: Any) -> str | None:
    """Why the kernels cannot compute this call; None if they can."""
    return checks.refusal((*inputs.tensors(), state))


def scan(
    inputs: ScanInputs,
    state: Tensor | None = None,
    *,
    final: bool = True,
    backward: bool = False,
) -> tuple[Tensor, Tensor]:
    """See `longrnn.ops.scan.definition.scan`."""
    if channels.suits(inputs):
        return channels.scan(inputs, state, final=final, backward=backward)
    has_few_tokens = inputs.x.shape[1] <= FEW
    if is_entrywise(inputs) and not inputs.has_key_decays and not has_few_tokens:
        return definition.scan(inputs, state, final=final, backward=backward)
    return recurrence("scan", inputs, state, final=final, backward=backward)


def recurrence(
    kernel: str,
    inputs: ScanInputs,
    state: Tensor | None,
    *,
    final: bool = True,
    backward: bool = False,
) -> tuple[Tensor, Tensor]:
    """A recurrence by the kernel `scan` or `delta`, which read log decays."""
    inputs = inputs.expanded()
    if not tracked((*inputs.tensors(), state)):
        return untracked(inputs, state, kernel, final=final, backward=backward)
    state = inputs.zero_state() if state is None else state
    if kernel == "delta" or inputs.has_key_decays:  # gradients of B and C of every head
        inputs = inputs._replace(B=inputs.per_head(inputs.B), C=inputs.per_head(inputs.C))
    return reversible(partial(_differentiable, kernel))(inputs, state, backward=backward)


def _differentiable(kernel: str, inputs: ScanInputs, state: Tensor) -> tuple[Tensor, Tensor]:
    return _Recurrence.apply(kernel, *_read(inputs).values(), state)


def untracked(
    inputs: ScanInputs,
    state: Tensor | None,
    kernel: str,
    *,
    final: bool = True,
    backward: bool = False,
    limit: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """`recurrence` without gradients, of expanded inputs; `limit`: see `limit.limited`."""
    dtype = inputs.decay.step.dtype if state is None else state.dtype
    inputs, state = readable(inputs, state, dtype)
    (b, _, h, p), n = inputs.x.shape, inputs.B.shape[3]
    y = inputs.x.new_empty(inputs.x.shape)
    after = inputs.x.new_empty(b, h, p, n) if final else None
    fields = scan_fields(inputs, state) | {"y": y, "final_state": after}
    if backward:  # the strides of time point backward, from the last token
        fields |= {name: fields[name][:, -1:] for name in ("x", "B", "C", "y")}
        fields |= {name: -fields[name] for name in ("x_token", "bc_token", "y_token")}
        fields |= {name: fields[name].flip(1) for name in ("gain", "log_decay")}
    if limit is not None:
        fields["limit"] = limit.where(limit < UNLIMITED, torch.inf).contiguous()
        fields["limit_token"] = 0 if limit.ndim == 1 else limit.shape[1]
    call(kernel, dtype, **fields)
    return y, y if after is None else after


def readable(
    inputs: ScanInputs, state: Tensor | None, dtype: torch.dtype
) -> tuple[ScanInputs, Tensor | None]:
    """Expanded inputs and a state as the kernels read them, copied only where that is necessary.

    All are contiguous, but for x, B and C, of which each token is: they may be parts of one tensor.
    """
    x, B, C = (
        tensor if tensor.stride()[2:] == (tensor.shape[3], 1) else tensor.contiguous()
        for tensor in (inputs.x.to(dtype), inputs.B.to(dtype), inputs.C.to(dtype))
    )
    if B.stride() != C.stride():
        B, C = B.contiguous(), C.contiguous()
    gain, log_decay = inputs.gain.to(dtype), inputs.decay.step.to(dtype)
    inputs = ScanInputs(x, gain.contiguous(), Decay(log_decay.contiguous()), B, C)
    return inputs, None if state is None else state.to(dtype).contiguous()


def _read(inputs: ScanInputs) -> dict[str, Tensor]:
    """The tensors of expanded inputs as the kernels call them."""
    x, gain, decay, B, C = inputs
    return {"x": x, "gain": gain, "log_decay": decay.step, "B": B, "C": C}


def scan_fields(inputs: ScanInputs, state: Tensor | None) -> dict[str, Any]:
    """The arguments that the kernels of recurrences share."""
    (b, t, h, p), (g, n) = inputs.x.shape, inputs.B.shape[2:]
    (x_row, x_token), (bc_row, bc_token) = inputs.x.stride()[:2], inputs.B.stride()[:2]
    return {
        "b": b,
        "t": t,
        "h": h,
        "p": p,
        "g": g,
        "n": n,
        "decays": n if inputs.decay.step.ndim == 4 else 1,
        "x_row": x_row,
        "x_token": x_token,
        "bc_row": bc_row,
        "bc_token": bc_token,
        "y_token": h * p,
        **_read(inputs),
        "state": state,
    }


class _Recurrence(torch.autograd.Function):
    """A recurrence with its backward pass, which the kernel `<kernel>_gradient` computes."""

    @staticmethod
    def forward(ctx: Any, kernel: str, *tensors: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(*tensors)
        ctx.kernel = kernel
        ctx.set_materialize_grads(False)
        x, gain, log_decay, B, C, state = tensors
        return untracked(ScanInputs(x, gain, Decay(log_decay), B, C), state, kernel)

    @staticmethod
    def backward(  # type: ignore[override]
        ctx: Any, grad_y: Tensor | None, grad_final: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        refuse_second_derivatives()
        x, gain, log_decay, B, C, state = ctx.saved_tensors
        given = ScanInputs(x, gain, Decay(log_decay), B, C)
        if grad_y is None and grad_final is None:
            return (None,) * 7
        dtype = state.dtype
        inputs, before = readable(given, state, dtype)
        grad_y = torch.zeros_like(inputs.x) if grad_y is None else grad_y
        grads = {name: tensor.new_zeros(tensor.shape) for name, tensor in _read(inputs).items()}
        grad_state = state.new_empty(state.shape)
        call(
            f"{ctx.kernel}_gradient",
            dtype,
            **scan_fields(inputs, before),
            **{f"grad_{name}": grad for name, grad in grads.items()},
            grad_y=grad_y.to(dtype).contiguous(),
            grad_final=None if grad_final is None else grad_final.contiguous(),
            grad_state=grad_state,
        )
        narrow = (grads[name].to(tensor.dtype) for name, tensor in _read(given).items())
        return None, *narrow, grad_state


def windowed_scan(
    inputs: ScanInputs, recent: Recent, w: int, rows: Rows | None = None
) -> tuple[Tensor, Recent]:
    """See `longrnn.ops.scan.window.windowed`."""
    attend = channels.attend if channels.suits(inputs) else None
    return windowed(inputs, recent, w, rows, scan=scan, attend=attend)


def limited_scan(inputs: ScanInputs, state: Tensor, limit: Tensor) -> tuple[Tensor, Tensor]:
    """See `longrnn.ops.scan.limit.limited`, which computes calls with gradients."""
    if tracked((*inputs.tensors(), state)):
        return limited(inputs, state, limit, scan)
    if channels.suits(inputs) and limit.ndim == 1:
        return channels.run(inputs, state, limit)
    return untracked(inputs.expanded(), state, "scan", limit=limit)
