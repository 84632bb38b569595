"""The recurrence by the Triton kernels of mamba-ssm, for what their interface expresses.

`mamba_chunk_scan_combined(x, dt, A, …)` computes h_t = exp(dt_t A) h_{t−1} + dt_t x_t B_t^T, so a
call is possible where log_decay is gain times one negative number per head, as in a Mamba-2 without
mitigations. Everything else is refused, and so is a call that is long enough to overflow the
kernels' 32-bit offsets, beyond which they return wrong numbers (state-spaces/mamba#1015).

Notable choices:
- gain is passed as dt, and A is found by division. A call on a GPU waits for the device once,
  because whether the inputs can be expressed depends on their values.
- The gradient of dt that the kernels return is that of gain plus A times that of log_decay. The
  first is Σ_p x ∂x / gain, so the second follows, and both are the partial derivatives that the
  other backends return.
- Values are those of mamba-ssm: with bfloat16 inputs it rounds outputs and the states between
  chunks to bfloat16. It adds up decays in float32, with errors of some 1e-4 where a strong decay
  precedes slow ones. `chunked` does neither.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from longrnn.errors import UserError
from longrnn.files import one_line
from longrnn.ops.precision import own_precision
from longrnn.ops.ssd.base import ScanInputs

# Tokens per chunk, the default of mamba-ssm.
CHUNK = 256
DEVICES = ("cuda",)
# The first offset that does not fit into the 32 bits of the kernels.
OFFSETS = 2**31
# log_decay is a rounded product, and A a rounded quotient.
ROUNDING = 4 * torch.finfo(torch.float32).eps / 2


def ssd(inputs: ScanInputs, state: Tensor) -> tuple[Tensor, Tensor]:
    """See `longrnn.ops.ssd.base.SSD`.

    Raises:
        UserError: mamba-ssm cannot be imported, the tensors are not on a GPU or not float32 or
            narrower, the call is too long, or log_decay is not gain times one number per head.
    """
    scan = combined()
    _check_tensors(inputs, state)
    with own_precision(state):
        rates = _rates(inputs)
        x, dt = _Separated.apply(inputs.x, inputs.gain, inputs.log_decay, rates)
        y, final = scan(
            x,
            dt,
            rates,
            inputs.B,
            inputs.C,
            CHUNK,
            initial_states=state,
            return_final_states=True,
        )
    return y.to(state.dtype), final.to(state.dtype)


@cache
def combined() -> Callable[..., Any]:
    """The function of mamba-ssm.

    Raises:
        UserError: it cannot be imported.
    """
    try:
        from mamba_ssm.ops.triton.ssd_combined import (  # pyright: ignore[reportMissingImports]
            mamba_chunk_scan_combined,
        )
    except Exception as error:  # compiled parts raise OSError or RuntimeError on another machine
        raise UserError(
            f"the backend mamba_ssm needs the package mamba-ssm, which cannot be imported "
            f'({one_line(error)}): pip install mamba-ssm, or use backend="chunked"'
        ) from error
    return mamba_chunk_scan_combined


def missing(device: str) -> str | None:
    """Why the backend cannot run on a type of device, and what to do; None if it can."""
    if device not in DEVICES:
        return "it runs on NVIDIA GPUs only: use backend=auto"
    try:
        combined()
    except UserError as error:
        return str(error)
    return None


def longest_call(inputs: ScanInputs, state: Tensor) -> tuple[int, str]:
    """The most tokens of a call whose offsets fit into 32 bits, and the tensor that limits them.

    Rows are added to the offsets, so that more rows leave fewer tokens.
    """
    rows, _, heads, head_dim = inputs.x.shape
    given = {"x": inputs.x, "B": inputs.B, "C": inputs.C, "gain": inputs.gain}
    limits = {
        name: (OFFSETS - (rows - 1) * tensor.stride(0)) // max(1, tensor.stride(1))
        for name, tensor in given.items()
    }
    limits["y"] = OFFSETS // (rows * heads * head_dim)
    limits["the states of chunks"] = OFFSETS // state.numel() * CHUNK
    # C Bᵀ within each chunk, for each group.
    limits["the products of C and B"] = OFFSETS // (rows * inputs.B.shape[2] * CHUNK)
    name = min(limits, key=limits.__getitem__)
    return max(0, limits[name]), name


def _check_tensors(inputs: ScanInputs, state: Tensor) -> None:
    """Refuses devices, dtypes and lengths that the kernels do not take."""
    if state.device.type not in DEVICES:
        raise UserError(
            f"the backend mamba_ssm runs on a GPU and the tensors are on the {state.device.type}: "
            'move model and tokens to a GPU, or use backend="chunked"'
        )
    if torch.float64 in (state.dtype, inputs.x.dtype, inputs.log_decay.dtype):
        raise UserError(
            "the backend mamba_ssm computes in float32 and was given float64: use float32 weights, "
            'or backend="chunked"'
        )
    tokens, (longest, name) = inputs.x.shape[1], longest_call(inputs, state)
    if tokens > longest:
        raise UserError(
            f"a call of {tokens:,} tokens is too long for mamba_ssm, which has 32-bit offsets into "
            f'{name}: give at most {longest:,} tokens per call, or use backend="chunked"'
        )


@torch.no_grad()
def _rates(inputs: ScanInputs) -> Tensor:
    """A `(h,)` float32 with log_decay = gain · A.

    Raises:
        UserError: there is none, or it is not negative.
    """
    gain, log_decay = inputs.gain.float(), inputs.log_decay.float()
    heads = gain.shape[2]
    largest, index = gain.reshape(-1, heads).max(0)
    rates = log_decay.reshape(-1, heads).gather(0, index[None])[0] / largest
    differs = (gain * rates - log_decay).abs() > ROUNDING * log_decay.abs()
    begins = (log_decay == -torch.inf).any()
    valid = (gain > 0).all() & (rates < 0).all() & ~differs.any()
    begins, valid = torch.stack([begins, valid]).tolist()  # the only wait for the device
    if begins:
        raise UserError(
            "the backend mamba_ssm cannot begin a document within a row (a log decay of −∞): "
            'give one document per row, or use backend="chunked"'
        )
    if not valid:
        raise UserError(
            "the backend mamba_ssm takes decays that are the step times one negative number per "
            "head, and these are not, as under a mitigation that changes them per token or at "
            'padding: leave these out, or use backend="chunked"'
        )
    return rates


class _Separated(torch.autograd.Function):
    """x and gain unchanged; the gradient of dt is divided between gain and log_decay."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, gain: Tensor, log_decay: Tensor, rates: Tensor
    ) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(x, gain, rates)
        ctx.dtype = log_decay.dtype
        return x.view_as(x), gain.view_as(gain)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_x: Tensor, grad_dt: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        x, gain, rates = ctx.saved_tensors
        # h depends on x and gain through their product: gain ∂gain = Σ_p x ∂x.
        grad_gain = (x.float() * grad_x).sum(-1) / gain
        grad_log_decay = (grad_dt - grad_gain) / rates
        return grad_x, grad_gain.to(gain.dtype), grad_log_decay.to(ctx.dtype), None
