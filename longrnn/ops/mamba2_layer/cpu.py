"""Everything between the projections of a Mamba-2 layer in one call of C++, with gradients."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from longrnn.ops.conv.definition import ConvState
from longrnn.ops.cpu import checks
from longrnn.ops.cpu.checks import SEGMENT, refuse_second_derivatives, tracked
from longrnn.ops.cpu.library import call
from longrnn.ops.mamba2_layer.definition import TENSORS, Weights
from longrnn.ops.scan.cpu import kept_states


class WeightNumbers(NamedTuple):
    """The fields of `Weights` that are numbers."""

    groups: int
    norm_eps: float
    dt_limit: tuple[float, float]


def refusal(projected: Tensor, weights: Weights, state: ConvState) -> str | None:
    """Why the kernel cannot compute this call; None if it can."""
    tensors = (projected, *weights.tensors().values(), *state)
    return checks.refusal(tensors) or checks.taps_refusal(weights.conv_weight.shape[1])


def layer(projected: Tensor, weights: Weights, state: ConvState) -> tuple[Tensor, ConvState]:
    """See `longrnn.ops.mamba2_layer.definition.layer`."""
    if not tracked((projected, *weights.tensors().values(), *state)):
        return _layer(projected, weights, state)
    y, conv, ssm = _Layer.apply(
        WeightNumbers(weights.groups, weights.norm_eps, weights.dt_limit),
        projected,
        weights.conv_weight,
        weights.conv_bias,
        weights.dt_bias,
        weights.A_log,
        weights.D,
        weights.norm_weight,
        state.conv,
        state.ssm,
    )
    return y, ConvState(conv, ssm)


def _layer(
    projected: Tensor,
    weights: Weights,
    state: ConvState,
    scanned: Tensor | None = None,
    kept: Tensor | None = None,
) -> tuple[Tensor, ConvState]:
    before = state.ssm.contiguous()
    dtype = before.dtype
    b, h, p, _n = before.shape
    # Not on torch's default device, which may differ.
    y = projected.new_empty(b, projected.shape[1], h * p)
    after = ConvState(torch.empty_like(state.conv), torch.empty_like(before))
    written_conv, written_y = _mixed(after.conv, dtype), _mixed(y, dtype)
    read = {name: _mixed(tensor, dtype) for name, tensor in weights.tensors().items()}
    call(
        "cell",
        dtype,
        **_sizes(projected, weights, before),
        **read,
        projected=_mixed(projected, dtype),
        conv=_mixed(state.conv, dtype),
        state=before,
        state_after=after.ssm,
        conv_after=written_conv,
        y=written_y,
        scanned=scanned,
        kept=kept,
    )
    for result, written in ((after.conv, written_conv), (y, written_y)):
        if written is not result:
            result.copy_(written)  # type: ignore[arg-type]
    return y, after


def _sizes(projected: Tensor, weights: Weights, state: Tensor) -> dict[str, Any]:
    b, h, p, n = state.shape
    return {
        "b": b,
        "t": projected.shape[1],
        "h": h,
        "p": p,
        "g": weights.groups,
        "n": n,
        "k": weights.conv_weight.shape[1],
        "norm_eps": weights.norm_eps,
        "segment": SEGMENT,
        "dt_least": weights.dt_limit[0],
        "dt_largest": weights.dt_limit[1],
    }


def _mixed(tensor: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """A tensor as the kernel reads it: contiguous, in `dtype` or in bfloat16."""
    if tensor is None:
        return None
    narrow = tensor.dtype == torch.bfloat16 and dtype == torch.float32
    return (tensor if narrow else tensor.to(dtype)).contiguous()


class _Layer(torch.autograd.Function):
    """`_layer` with its gradients."""

    @staticmethod
    def forward(
        ctx: Any,
        options: WeightNumbers,
        projected: Tensor,
        conv_weight: Tensor,
        conv_bias: Tensor | None,
        dt_bias: Tensor,
        A_log: Tensor,
        D: Tensor,
        norm_weight: Tensor,
        conv: Tensor,
        state: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        scanned = state.new_empty(*projected.shape[:2], state.shape[1] * state.shape[2])
        kept = kept_states(projected.shape[1], state)
        weights = Weights(
            conv_weight, conv_bias, dt_bias, A_log, D, norm_weight, **options._asdict()
        )
        y, after = _layer(projected, weights, ConvState(conv, state), scanned, kept)
        # In the dtype of the result, unless its range is too small: before the norm, values may be
        # above the largest float16.
        saved = scanned.to(y.dtype) if y.dtype == torch.bfloat16 else scanned
        ctx.save_for_backward(
            projected, conv_weight, conv_bias, dt_bias, A_log, D, norm_weight, conv, state, saved,
            kept,
        )  # fmt: skip
        ctx.options = options
        ctx.set_materialize_grads(False)
        return y, after.conv, after.ssm

    @staticmethod
    def backward(  # type: ignore[override]
        ctx: Any, grad_y: Tensor | None, grad_conv: Tensor | None, grad_state: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        refuse_second_derivatives()
        if grad_y is None and grad_conv is None and grad_state is None:
            return (None,) * 10
        names = ("projected", *TENSORS, "conv", "state", "scanned", "kept")
        saved: dict[str, Any] = dict(zip(names, ctx.saved_tensors, strict=True))
        scanned, kept = saved.pop("scanned"), saved.pop("kept")
        projected, conv, state = saved["projected"], saved["conv"], saved["state"]
        dtype = kept.dtype
        wide = {name: _wide(tensor, dtype) for name, tensor in saved.items()}
        grads = {
            name: None if tensor is None else torch.empty_like(tensor)
            for name, tensor in wide.items()
        }
        weights = Weights(**{name: saved[name] for name in TENSORS}, **ctx.options._asdict())
        (b, t, _), (_, h, p, _), channels = projected.shape, state.shape, conv.shape[2]
        # Per token: the convolution's output and its gradient, that of the recurrence, and five
        # numbers per head. A tensor, so that measurements of memory see it.
        work = kept.new_empty(b * t, 2 * channels + (p + 5) * h)
        call(
            "cell_gradient",
            dtype,
            **_sizes(projected, weights, state),
            **wide,
            **{f"grad_{name}": grad for name, grad in grads.items()},
            scanned=_wide(scanned, dtype),
            kept=kept,
            work=work,
            grad_y=_wide(torch.zeros_like(scanned) if grad_y is None else grad_y, dtype),
            grad_conv_after=_wide(grad_conv, dtype),
            grad_state_after=_wide(grad_state, dtype),
        )
        narrow = (
            None if grad is None else grad.to(saved[name].dtype) for name, grad in grads.items()
        )
        return None, *narrow


def _wide(tensor: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    return None if tensor is None else tensor.to(dtype).contiguous()
