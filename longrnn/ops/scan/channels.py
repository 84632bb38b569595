"""The recurrence of heads of one channel whose keys have rates of their own (Mamba-1), in C++.

The decays of all keys and tokens never exist in memory. The gradient cannot itself be
differentiated.
"""

from typing import Any

from torch import Tensor

from longrnn.ops.cpu.checks import tracked
from longrnn.ops.cpu.gradients import Differentiable
from longrnn.ops.cpu.library import call
from longrnn.ops.scan.inputs import Decay, ScanInputs


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


def run(inputs: ScanInputs, state: Tensor, limit: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The recurrence; with a limit `(h,)`, see `longrnn.ops.scan.limit`, without gradients."""
    x, gain, (step, rate, keep), B, C = inputs
    assert rate is not None

    def fields(
        *, x: Tensor, gain: Tensor, step: Tensor, rates: Tensor, B: Tensor, C: Tensor, state: Tensor
    ) -> dict[str, Any]:
        return _fields(ScanInputs(x, gain, Decay(step, rates[0], keep), B, C), state)

    def compute(**tensors: Tensor) -> tuple[Tensor, Tensor]:
        y, after = state.new_empty(x.shape), state.new_empty(state.shape)
        call("channels", state.dtype, **fields(**tensors), limit=limit, y=y, final_state=after)
        return y, after

    # The rates of every row, because threads may not add to the same number of the gradient.
    rates = rate.expand(len(x), *rate.shape)
    return Differentiable("channels", fields, compute)(
        x=x, gain=gain, step=step, rates=rates, B=B, C=C, state=state
    )


def attend(both: ScanInputs, C: Tensor, w: int) -> Tensor:
    """See `longrnn.ops.scan.window.attention`."""
    state = C.new_empty(0, dtype=both.gain.dtype)
    y = both.gain.new_empty(*C.shape[:2], *both.x.shape[2:])
    known = both.x.shape[1] - C.shape[1]
    fields = _fields(both._replace(C=C), state)
    call("windowed_channels", state.dtype, **fields, known=known, window=w, y=y)
    return y


def _fields(inputs: ScanInputs, state: Tensor) -> dict[str, Any]:
    """The arguments that the kernels share."""
    (b, t, h, _), (g, n) = inputs.x.shape, inputs.B.shape[2:]
    step, rate, keep = inputs.decay
    log_keep = None if keep is None else keep.log()
    given = {"x": inputs.x, "gain": inputs.gain, "step": step, "rate": rate, "log_keep": log_keep}
    given |= {"B": inputs.B, "C": inputs.C, "state": state}
    tensors = {
        name: None if tensor is None else tensor.to(state.dtype).contiguous()
        for name, tensor in given.items()
    }
    keep_token = h if keep is not None and keep.ndim == 3 else 0
    sizes = {"b": b, "t": t, "h": h, "g": g, "n": n, "capacity": t, "keep_token": keep_token}
    return sizes | tensors
