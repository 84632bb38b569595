"""The recurrence in C++ with its gradient, and without gradients under a limit of norms.

Both compute in the dtype of the state, float32 or float64, and take and return tensors of any
dtype. The backward pass keeps the inputs, and computes everything else again. It cannot itself be
differentiated. With decays per key it has no gradient: torch computes it where one is needed.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from longrnn.ops.cpu import checks
from longrnn.ops.cpu.checks import refuse_second_derivatives, tracked
from longrnn.ops.cpu.library import call
from longrnn.ops.scan import definition
from longrnn.ops.scan.definition import FEW, ScanInputs, is_entrywise, reversible
from longrnn.ops.scan.limit import UNLIMITED, limited

# Smaller limits of a norm have squares that underflow float32.
MIN_LIMIT = 1e-6


def refusal(inputs: ScanInputs, state: Tensor | None = None, *others: Any) -> str | None:
    """Why the kernels cannot compute this call; None if they can."""
    return checks.refusal((*inputs, state))


def scan(
    inputs: ScanInputs,
    state: Tensor | None = None,
    *,
    final: bool = True,
    backward: bool = False,
) -> tuple[Tensor, Tensor]:
    """See `longrnn.ops.scan.definition.scan`, which computes gradients with decays per key."""
    is_tracked, few = tracked((*inputs, state)), inputs.x.shape[1] <= FEW
    if inputs.has_key_decays and not is_tracked:
        return untracked(inputs, state, "key_scan", backward=backward)
    if inputs.has_key_decays or (is_entrywise(inputs) and not few):
        return definition.scan(inputs, state, final=final, backward=backward)
    if is_tracked:
        state = inputs.zero_state() if state is None else state
        return reversible(_differentiable)(inputs, state, backward=backward)
    return untracked(inputs, state, "scan", final=final, backward=backward)


def _differentiable(inputs: ScanInputs, state: Tensor) -> tuple[Tensor, Tensor]:
    return _Scan.apply(*inputs, state)


def untracked(
    inputs: ScanInputs,
    state: Tensor | None,
    kernel: str,
    *,
    final: bool = True,
    backward: bool = False,
) -> tuple[Tensor, Tensor]:
    """A recurrence without gradients, by `scan`, `key_scan`, `key_delta` or `delta`."""
    few = inputs.x.shape[1] <= FEW
    if state is None and (few or kernel != "scan"):  # only chunks of `scan` know a state of 0
        state = inputs.zero_state()
    dtype = inputs.log_decay.dtype if state is None else state.dtype
    inputs, state = readable(inputs, state, dtype)
    y = inputs.x.new_empty(inputs.x.shape)
    (b, _, h, p), n = inputs.x.shape, inputs.B.shape[3]
    after = inputs.x.new_empty(b, h, p, n) if final or few else None
    fields = scan_fields(inputs, state) | {"y": y, "final_state": after}
    if backward:  # the strides of time point backward, from the last token
        fields |= {name: fields[name][:, -1:] for name in ("x", "B", "C", "y")}
        fields |= {name: -fields[name] for name in ("x_token", "bc_token", "y_token")}
        fields |= {name: fields[name].flip(1) for name in ("gain", "log_decay")}
    call(kernel, dtype, **fields)
    return y, y if after is None else after


def readable(
    inputs: ScanInputs, state: Tensor | None, dtype: torch.dtype
) -> tuple[ScanInputs, Tensor | None]:
    """Inputs and state as the kernels read them, copied only where that is necessary.

    All are contiguous, but for x, B and C, of which each token is: they may be parts of one tensor.
    """
    x, B, C = (
        tensor if tensor.stride()[2:] == (tensor.shape[3], 1) else tensor.contiguous()
        for tensor in (inputs.x.to(dtype), inputs.B.to(dtype), inputs.C.to(dtype))
    )
    if B.stride() != C.stride():
        B, C = B.contiguous(), C.contiguous()
    gain, log_decay = inputs.gain.to(dtype), inputs.log_decay.to(dtype)
    inputs = ScanInputs(x, gain.contiguous(), log_decay.contiguous(), B, C)
    return inputs, None if state is None else state.to(dtype).contiguous()


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
        "x_row": x_row,
        "x_token": x_token,
        "bc_row": bc_row,
        "bc_token": bc_token,
        "y_token": h * p,
        **inputs._asdict(),
        "state": state,
    }


class _Scan(torch.autograd.Function):
    """`scan` with its backward pass."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, gain: Tensor, log_decay: Tensor, B: Tensor, C: Tensor, state: Tensor
    ) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(x, gain, log_decay, B, C, state)
        ctx.set_materialize_grads(False)
        return untracked(ScanInputs(x, gain, log_decay, B, C), state, "scan")

    @staticmethod
    def backward(  # type: ignore[override]
        ctx: Any, grad_y: Tensor | None, grad_final: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        refuse_second_derivatives()
        x, gain, log_decay, B, C, state = ctx.saved_tensors
        given = ScanInputs(x, gain, log_decay, B, C)
        if grad_y is None and grad_final is None:
            return (None,) * 6
        dtype = state.dtype
        inputs, before = readable(given, state, dtype)
        grad_y = torch.zeros_like(inputs.x) if grad_y is None else grad_y
        grads = {name: tensor.new_empty(tensor.shape) for name, tensor in inputs._asdict().items()}
        grad_state = state.new_empty(state.shape)
        (x_row, x_token), (bc_row, bc_token) = grads["x"].stride()[:2], grads["B"].stride()[:2]
        call(
            "scan_gradient",
            dtype,
            **scan_fields(inputs, before),
            **{f"grad_{name}": grad for name, grad in grads.items()},
            adds_x=0,
            grad_x_row=x_row,
            grad_x_token=x_token,
            grad_bc_row=bc_row,
            grad_bc_token=bc_token,
            grad_y=grad_y.to(dtype).contiguous(),
            grad_final=None if grad_final is None else grad_final.contiguous(),
            grad_state=grad_state,
        )
        narrow = (grad.to(getattr(given, name).dtype) for name, grad in grads.items())
        return *narrow, grad_state


def limited_scan(inputs: ScanInputs, state: Tensor, limit: Tensor) -> tuple[Tensor, Tensor]:
    """See `longrnn.ops.scan.limit.limited`.

    It computes calls with gradients or decays per key, and those in which squares leave the range
    of float32.
    """
    if tracked((*inputs, state)) or inputs.has_key_decays:
        return limited(inputs, state, limit, scan)
    dtype = state.dtype
    given, before = readable(inputs, state, dtype)
    y, final = given.x.new_empty(given.x.shape), state.new_empty(state.shape)
    fits = (
        limit.ndim == 1
        and bool((limit >= MIN_LIMIT).all())
        and call(
            "limited_scan",
            dtype,
            **scan_fields(given, before),
            y=y,
            final_state=final,
            limit=limit.where(limit < UNLIMITED, torch.inf),
        )
    )
    return (y, final) if fits else limited(inputs, state, limit, scan)
