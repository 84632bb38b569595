"""Everything between the projections of a Mamba-2 layer in one call of C++, with gradients."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from longrnn.ops.conv.definition import ConvState
from longrnn.ops.cpu import checks
from longrnn.ops.cpu.checks import refuse_second_derivatives, tracked
from longrnn.ops.cpu.library import call
from longrnn.ops.mamba2_layer.definition import TENSORS, Weights


def refusal(projected: Tensor, weights: Weights, state: ConvState) -> str | None:
    """Why the kernel cannot compute this call; None if it can."""
    tensors = (projected, *weights.tensors().values(), *state)
    return checks.refusal(tensors) or checks.taps_refusal(weights.conv_weight.shape[1])


def layer(projected: Tensor, weights: Weights, state: ConvState) -> tuple[Tensor, ConvState]:
    """See `longrnn.ops.mamba2_layer.definition.layer`."""
    tensors = weights.tensors()
    if not tracked((projected, *tensors.values(), *state)):
        return _layer(projected, weights, state)
    options = weights._replace(**dict.fromkeys(TENSORS))
    y, conv, ssm = _Layer.apply(options, projected, *state, *tensors.values())
    return y, ConvState(conv, ssm)


def _layer(
    projected: Tensor, weights: Weights, state: ConvState, scanned: Tensor | None = None
) -> tuple[Tensor, ConvState]:
    """`layer`; the output of the recurrence is written to `scanned`, if it is given."""
    b, h, p, _ = state.ssm.shape
    dtype = state.ssm.dtype
    # Not on torch's default device, which may differ.
    y = projected.new_empty(b, projected.shape[1], h * p)
    after = ConvState(torch.empty_like(state.conv), state.ssm.new_empty(state.ssm.shape))
    written_conv, written_y = _mixed(after.conv, dtype), _mixed(y, dtype)
    call(
        "cell",
        dtype,
        **_fields(projected, weights, state),
        state_after=after.ssm,
        conv_after=written_conv,
        y=written_y,
        scanned=scanned,
    )
    for result, written in ((after.conv, written_conv), (y, written_y)):
        if written is not result:
            result.copy_(written)  # type: ignore[arg-type]
    return y, after


def _fields(projected: Tensor, weights: Weights, state: ConvState) -> dict[str, Any]:
    """The arguments that the kernel and its gradient share."""
    b, h, p, n = state.ssm.shape
    read = {"projected": projected, "conv": state.conv, **weights.tensors()}
    return {
        "b": b,
        "t": projected.shape[1],
        "h": h,
        "p": p,
        "g": weights.groups,
        "n": n,
        "k": weights.conv_weight.shape[1],
        "norm_eps": weights.norm_eps,
        "dt_least": weights.dt_limit[0],
        "dt_largest": weights.dt_limit[1],
        "state": state.ssm.contiguous(),
        **{name: _mixed(tensor, state.ssm.dtype) for name, tensor in read.items()},
    }


def _mixed(tensor: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """A tensor as the kernel reads it: contiguous, in `dtype` or in bfloat16."""
    if tensor is None:
        return None
    narrow = tensor.dtype == torch.bfloat16 and dtype == torch.float32
    return (tensor if narrow else tensor.to(dtype)).contiguous()


def _wide(tensor: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """A tensor that the kernel reads in `dtype` alone."""
    return None if tensor is None else tensor.to(dtype).contiguous()


class _Layer(torch.autograd.Function):
    """`_layer` with its gradients."""

    @staticmethod
    def forward(
        ctx: Any,
        options: Weights,
        projected: Tensor,
        conv: Tensor,
        state: Tensor,
        *tensors: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The results of `_layer`; `options` are the weights without those of TENSORS."""
        weights = options._replace(**dict(zip(TENSORS, tensors, strict=True)))
        scanned = state.new_empty(*projected.shape[:2], state.shape[1] * state.shape[2])
        y, after = _layer(projected, weights, ConvState(conv, state), scanned)
        # In the dtype of the result, unless its range is too small: before the norm, values may be
        # above the largest float16.
        saved = scanned.to(y.dtype) if y.dtype == torch.bfloat16 else scanned
        ctx.save_for_backward(saved, projected, conv, state, *tensors)
        ctx.options = options
        ctx.set_materialize_grads(False)
        return y, after.conv, after.ssm

    @staticmethod
    def backward(  # type: ignore[override]
        ctx: Any, grad_y: Tensor | None, grad_conv: Tensor | None, grad_state: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        refuse_second_derivatives()
        scanned, projected, conv, state, *tensors = ctx.saved_tensors
        weights = ctx.options._replace(**dict(zip(TENSORS, tensors, strict=True)))
        given = {"projected": projected, "conv": conv, "state": state, **weights.tensors()}
        if grad_y is None and grad_conv is None and grad_state is None:
            return (None,) * (1 + len(given))
        dtype, (b, t, _), (_, h, p, _) = state.dtype, projected.shape, state.shape
        grads = {
            name: None if tensor is None else tensor.new_empty(tensor.shape, dtype=dtype)
            for name, tensor in given.items()
        }
        call(
            "cell_gradient",
            dtype,
            **_fields(projected, weights, ConvState(conv, state)),
            **{f"grad_{name}": grad for name, grad in grads.items()},
            scanned=_wide(scanned, dtype),
            # Per token: the convolution's output and its gradient, that of the recurrence, and five
            # numbers per head. A tensor, so that measurements of memory see it.
            work=state.new_empty(b * t, 2 * conv.shape[2] + (p + 5) * h),
            grad_y=_wide(torch.zeros_like(scanned) if grad_y is None else grad_y, dtype),
            grad_conv_after=_wide(grad_conv, dtype),
            grad_state_after=_wide(grad_state, dtype),
        )
        narrow = (
            None if grad is None else grad.to(given[name].dtype) for name, grad in grads.items()
        )
        return None, *narrow
