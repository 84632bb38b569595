"""The recurrences and the limit of their norm in C++, and the gradient of that of Mamba-2.

All compute in the dtype of the state, float32 or float64, and take and return tensors of any dtype.
Their callers ask `refusal` first. A backward pass keeps the inputs and one state per SEGMENT
tokens, and computes everything else again. It cannot itself be differentiated.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from longrnn.errors import UserError
from longrnn.ops.cpu.library import call, missing
from longrnn.ops.delta.definition import delta as torch_delta
from longrnn.ops.limit import UNLIMITED, limited
from longrnn.ops.scan.definition import FEW, ScanInputs, reversible
from longrnn.ops.transforms import is_transformed

SEGMENT = 512
# Smaller limits of a norm have squares that underflow float32.
MIN_LIMIT = 1e-6


def refusal(tensors: Sequence[Tensor | None]) -> str | None:
    """Why the kernels cannot read these tensors; None if they can."""
    if (why := missing()) is not None:
        return why
    for one in tensors:
        if one is not None and (one.device.type != "cpu" or type(one) not in (Tensor, Parameter)):
            return "its tensors are not plain tensors on the CPU"
    if is_transformed():
        return "torch transforms or records its operations"
    return None


def tracked(tensors: Sequence[Tensor | None]) -> bool:
    """Whether the gradient of some of these tensors is needed."""
    return torch.is_grad_enabled() and any(one is not None and one.requires_grad for one in tensors)


def scan(
    inputs: ScanInputs,
    state: Tensor | None = None,
    *,
    final: bool = True,
    backward: bool = False,
) -> tuple[Tensor, Tensor]:
    """See `longrnn.ops.scan.definition.scan`."""
    few = inputs.x.shape[1] <= FEW
    if state is None and (few or tracked(inputs)):
        state = inputs.zero_state()
    tensors = (*inputs, state)
    if tracked(tensors):
        return reversible(_tracked_scan)(inputs, state, backward=backward)
    return _scan(tensors, final=final or few, backward=backward)


def _tracked_scan(inputs: ScanInputs, state: Tensor) -> tuple[Tensor, Tensor]:
    return _Scan.apply(*inputs, state)[:2]


def _scan(
    tensors: Sequence[Tensor | None],
    kept: Tensor | None = None,
    *,
    final: bool = True,
    backward: bool = False,
) -> tuple[Tensor, Tensor]:
    *_, state = tensors
    dtype = tensors[2].dtype if state is None else state.dtype  # type: ignore[union-attr]
    inputs, state = _scan_inputs(tensors, dtype)
    y = inputs.x.new_empty(inputs.x.shape)
    (b, _, h, p), n = inputs.x.shape, inputs.B.shape[3]
    after = inputs.x.new_empty(b, h, p, n) if final else None
    fields = _scan_fields(inputs, state) | {"y": y, "final_state": after, "kept": kept}
    if backward:  # the strides of time point backward, from the last token
        fields |= {name: fields[name][:, -1:] for name in ("x", "B", "C", "y")}
        fields |= {name: -fields[name] for name in ("x_token", "bc_token", "y_token")}
        fields |= {name: fields[name].flip(1) for name in ("gain", "log_decay")}
    call("scan", dtype, **fields)
    return y, y if after is None else after


def _scan_inputs(
    tensors: Sequence[Tensor | None], dtype: torch.dtype
) -> tuple[ScanInputs, Tensor | None]:
    """Inputs and state as the kernels read them, copied only where that is necessary.

    All are contiguous, but for x, B and C, of which each token is: they may be parts of one tensor.
    """
    *given, state = tensors
    x, gain, log_decay, B, C = (one.to(dtype) for one in given if one is not None)
    x, B, C = (
        one if one.stride()[2:] == (one.shape[3], 1) else one.contiguous() for one in (x, B, C)
    )
    if B.stride() != C.stride():
        B, C = B.contiguous(), C.contiguous()
    inputs = ScanInputs(x, gain.contiguous(), log_decay.contiguous(), B, C)
    return inputs, None if state is None else state.to(dtype).contiguous()


def _scan_fields(inputs: ScanInputs, state: Tensor | None) -> dict[str, Any]:
    (b, t, h, p), (g, n) = inputs.x.shape, inputs.B.shape[2:]
    (x_row, x_token), (bc_row, bc_token) = inputs.x.stride()[:2], inputs.B.stride()[:2]
    return {
        "b": b,
        "t": t,
        "h": h,
        "p": p,
        "g": g,
        "n": n,
        "segment": SEGMENT,
        "x_row": x_row,
        "x_token": x_token,
        "bc_row": bc_row,
        "bc_token": bc_token,
        "y_token": h * p,
        **inputs._asdict(),
        "state": state,
    }


def kept_states(tokens: int, state: Tensor) -> Tensor:
    """Memory for the states after each segment but the last."""
    return state.new_empty((tokens - 1) // SEGMENT, *state.shape)


class _Scan(torch.autograd.Function):
    """`scan`, and the states that its backward pass needs."""

    @staticmethod
    def forward(ctx: Any, *tensors: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        kept = kept_states(tensors[0].shape[1], tensors[5])
        ctx.save_for_backward(*tensors, kept)
        ctx.mark_non_differentiable(kept)
        ctx.set_materialize_grads(False)
        return *_scan(tensors, kept), kept

    @staticmethod
    def backward(  # type: ignore[override]
        ctx: Any, grad_y: Tensor | None, grad_final: Tensor | None, _: None
    ) -> tuple[Tensor | None, ...]:
        refuse_second_derivatives()
        *tensors, kept = ctx.saved_tensors
        if grad_y is None and grad_final is None:
            return (None,) * len(tensors)
        dtype = kept.dtype
        inputs, state = _scan_inputs(tensors, dtype)
        grad_y = torch.zeros_like(inputs.x) if grad_y is None else grad_y
        found = [one.new_empty(one.shape) for one in (*inputs, state) if one is not None]
        grads = {f"grad_{name}": one for name, one in zip(ScanInputs._fields, found, strict=False)}
        (x_row, x_token), (bc_row, bc_token) = found[0].stride()[:2], found[3].stride()[:2]
        call(
            "scan_gradient",
            dtype,
            **_scan_fields(inputs, state),
            **grads,
            y=None,
            final_state=None,
            kept=kept,
            adds_x=0,
            grad_x_row=x_row,
            grad_x_token=x_token,
            grad_bc_row=bc_row,
            grad_bc_token=bc_token,
            grad_y=grad_y.to(dtype).contiguous(),
            grad_final=None if grad_final is None else grad_final.contiguous(),
            grad_state=found[5],
        )
        return tuple(grad.to(one.dtype) for grad, one in zip(found, tensors, strict=True))


def limit(inputs: ScanInputs, state: Tensor, limit: Tensor) -> tuple[Tensor, Tensor]:
    """See `longrnn.ops.limit.limited`; where squares leave the range of float32, it is used."""
    dtype = state.dtype
    given, before = _scan_inputs((*inputs, state), dtype)
    y, final = given.x.new_empty(given.x.shape), state.new_empty(state.shape)
    fits = (
        limit.ndim == 1
        and bool((limit >= MIN_LIMIT).all())
        and call(
            "limited_scan",
            dtype,
            **_scan_fields(given, before),
            y=y,
            final_state=final,
            kept=None,
            unlimited=UNLIMITED,
            limit=limit.contiguous(),
        )
    )
    return (y, final) if fits else limited(inputs, state, limit, scan)


def delta(
    inputs: ScanInputs, state: Tensor | None = None, *, final: bool = True
) -> tuple[Tensor, Tensor]:
    """See `longrnn.ops.delta.definition.delta`, which computes more than FEW tokens."""
    if inputs.x.shape[1] > FEW:
        return torch_delta(inputs, state, final=final)
    state = inputs.zero_state() if state is None else state
    given, before = _scan_inputs((*inputs, state), state.dtype)
    y, after = given.x.new_empty(given.x.shape), state.new_empty(state.shape)
    fields = _scan_fields(given, before)
    call("delta", state.dtype, **fields, y=y, final_state=after, kept=None)
    return y, after


def refuse_second_derivatives() -> None:
    if torch.is_grad_enabled():
        raise UserError(
            "the C++ kernels have no second derivatives: load the model with backend='torch'"
        )
