"""The selective scan in C++, with its gradient, which cannot itself be differentiated."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from longrnn.ops.cpu import checks
from longrnn.ops.cpu.checks import refuse_second_derivatives, tracked
from longrnn.ops.cpu.library import call
from longrnn.ops.selective.definition import SelectiveInputs


def refusal(*tensors: Tensor) -> str | None:
    """Why the kernels cannot compute a call that reads these tensors; None if they can."""
    return checks.refusal(tensors)


def selective(inputs: SelectiveInputs, state: Tensor) -> tuple[Tensor, Tensor]:
    """Computes the selective scan.

    Args:
        inputs: t >= 1.
        state: `(b, h, n)`, float32 or float64.

    Returns:
        y `(b, t, h)`, and the state after the last token.
    """
    if tracked((*inputs, state)):
        return _Selective.apply(*inputs, state)
    return _selective(inputs, state)


def _fields(inputs: SelectiveInputs, state: Tensor) -> dict[str, Any]:
    (b, t, h), (g, n) = inputs.x.shape, inputs.B.shape[2:]
    sizes = {"b": b, "t": t, "h": h, "g": g, "n": n}
    tensors = {
        name: None if value is None else value.to(state.dtype).contiguous()
        for name, value in inputs._asdict().items()
    }
    return {**sizes, **tensors, "state": state.contiguous()}


def _selective(inputs: SelectiveInputs, state: Tensor) -> tuple[Tensor, Tensor]:
    fields = _fields(inputs, state)
    y, after = torch.empty_like(fields["x"]), torch.empty_like(fields["state"])
    call("channels", state.dtype, **fields, y=y, final_state=after)
    return y, after


class _Selective(torch.autograd.Function):
    """`selective` with its backward pass."""

    @staticmethod
    def forward(ctx: Any, *tensors: Any) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(*tensors)
        ctx.set_materialize_grads(False)
        *inputs, state = tensors
        return _selective(SelectiveInputs(*inputs), state)

    @staticmethod
    def backward(  # type: ignore[override]
        ctx: Any, grad_y: Tensor | None, grad_final: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        refuse_second_derivatives()
        tensors = ctx.saved_tensors
        *given, state = tensors
        inputs = SelectiveInputs(*given)
        fields = _fields(inputs, state)
        if grad_y is None:
            grad_y = torch.zeros_like(fields["x"])
        grads = {
            name: None if fields[name] is None else torch.empty_like(fields[name])
            for name in (*SelectiveInputs._fields, "state")
        }
        # Of every row, because threads may not add to the same number.
        grads["rate"] = state.new_empty(state.shape)
        call(
            "channels_gradient",
            state.dtype,
            **fields,
            grad_y=grad_y.to(state.dtype).contiguous(),
            grad_final=None if grad_final is None else grad_final.contiguous(),
            **{f"grad_{name}": grad for name, grad in grads.items() if name != "log_keep"},
        )
        grads |= {"rate": grads["rate"].sum(0), "log_keep": None}
        pairs = zip(grads.values(), tensors, strict=True)
        return tuple(None if grad is None else grad.to(tensor.dtype) for grad, tensor in pairs)
