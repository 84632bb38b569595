"""The recurrence of heads of one channel whose keys have rates of their own (Mamba-1), in C++.

The decays of all keys and tokens never exist in memory. The gradient cannot itself be
differentiated.
"""

from typing import Any

import torch
from torch import Tensor

from longrnn.ops.cpu.checks import refuse_second_derivatives, tracked
from longrnn.ops.cpu.library import call
from longrnn.ops.scan.definition import reversible
from longrnn.ops.scan.inputs import ScanInputs
from longrnn.ops.scan.window import TokenInputs


def suits(inputs: ScanInputs) -> bool:
    """Whether the kernels compute this recurrence."""
    step, rate, keep = inputs.decay
    return (
        inputs.x.shape[3] == 1
        and step.ndim == 3
        and rate is not None
        and rate.ndim == 2
        and not tracked([keep])
    )


@reversible
def scan(
    inputs: ScanInputs, state: Tensor | None = None, *, final: bool = True
) -> tuple[Tensor, Tensor]:
    """See `longrnn.ops.scan.definition.scan`."""
    state = inputs.zero_state() if state is None else state
    tensors = (*inputs.tensors(), state)
    return _Channels.apply(*tensors) if tracked(tensors) else run(inputs, state)


def run(inputs: ScanInputs, state: Tensor, limit: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The recurrence without gradients; `limit` `(h,)`: see `longrnn.ops.scan.limit`."""
    y, after = state.new_empty(inputs.x.shape), state.new_empty(state.shape)
    call("channels", state.dtype, **_fields(inputs, state), limit=limit, y=y, final_state=after)
    return y, after


def attend(both: TokenInputs, C: Tensor, w: int) -> Tensor:
    """See `longrnn.ops.scan.window.attention`."""
    state = C.new_empty(0, dtype=both.gain.dtype)
    y = both.gain.new_empty(*C.shape[:2], *both.x.shape[2:])
    known = both.x.shape[1] - C.shape[1]
    fields = _fields(both.read_by(C), state)
    call("windowed_channels", state.dtype, **fields, known=known, window=w, y=y)
    return y


def _fields(inputs: ScanInputs, state: Tensor) -> dict[str, Any]:
    """The arguments that the kernel and its gradient share."""
    (b, t, h, _), (g, n) = inputs.x.shape, inputs.B.shape[2:]
    keep = inputs.decay.keep
    given = {name: getattr(inputs, name) for name in ("x", "gain", "B", "C")}
    given |= {"step": inputs.decay.step, "rate": inputs.decay.rate, "state": state}
    given |= {"log_keep": None if keep is None else keep.log()}
    tensors = {
        name: None if tensor is None else tensor.to(state.dtype).contiguous()
        for name, tensor in given.items()
    }
    keep_token = h if keep is not None and keep.ndim == 3 else 0
    sizes = {"b": b, "t": t, "h": h, "g": g, "n": n, "capacity": t, "keep_token": keep_token}
    return sizes | tensors


class _Channels(torch.autograd.Function):
    """`run` with its backward pass, for the tensors of the inputs and the state."""

    @staticmethod
    def forward(ctx: Any, *tensors: Any) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(*tensors)
        ctx.set_materialize_grads(False)
        *inputs, state = tensors
        return run(ScanInputs.of(inputs), state)

    @staticmethod
    def backward(  # type: ignore[override]
        ctx: Any, grad_y: Tensor | None, grad_final: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        refuse_second_derivatives()
        tensors = ctx.saved_tensors
        *inputs, state = tensors
        fields = _fields(ScanInputs.of(inputs), state)
        grad_y = torch.zeros_like(fields["x"]) if grad_y is None else grad_y
        names = ("x", "gain", "step", "rate", "B", "C", "state")
        grads = {name: torch.empty_like(fields[name]) for name in names}
        # Of every row, because threads may not add to the same number.
        grads["rate"] = state.new_empty(state.shape)
        call(
            "channels_gradient",
            state.dtype,
            **fields,
            grad_y=grad_y.to(state.dtype).contiguous(),
            grad_final=None if grad_final is None else grad_final.contiguous(),
            **{f"grad_{name}": grad for name, grad in grads.items()},
        )
        grads["rate"] = grads["rate"].sum((0, 2))
        of_inputs = ("x", "gain", "step", "rate", "keep", "B", "C", "state")
        pairs = zip(map(grads.get, of_inputs), tensors, strict=True)
        return tuple(None if grad is None else grad.to(tensor.dtype) for grad, tensor in pairs)
