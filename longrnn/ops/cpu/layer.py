"""Everything between the projections of a Mamba-2 layer in C++, with gradients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from longrnn.ops.conv.definition import conv as torch_conv
from longrnn.ops.cpu.library import call
from longrnn.ops.cpu.recurrence import SEGMENT, kept_states, refuse_second_derivatives, tracked
from longrnn.ops.mamba2_layer.definition import Mamba2State, Weights
from longrnn.ops.rows import Rows

# Taps of the convolution, as in parts.h.
MOST_TAPS = 16
# Dtypes that `cell`, `few_rows` and `layers` read as they are.
MIXED = (torch.float32, torch.bfloat16)


def conv(
    x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor, rows: Rows | None = None
) -> tuple[Tensor, Tensor]:
    """See `longrnn.ops.conv.definition.conv`, which computes packed rows and long filters."""
    if rows is not None or weight.shape[1] > MOST_TAPS:
        return torch_conv(x, weight, bias, state, rows)
    dtype = torch.promote_types(torch.promote_types(x.dtype, weight.dtype), torch.float32)
    wide = x.to(dtype)
    wide = wide if wide.stride(2) == 1 else wide.contiguous()
    before, taps = state.to(dtype).contiguous(), weight.t().to(dtype).contiguous()
    y, after = torch.empty_like(wide, memory_format=torch.contiguous_format), before.clone()
    (b, t, c), k = x.shape, weight.shape[1]
    call(
        "convolution",
        dtype,
        b=b,
        t=t,
        c=c,
        k=k,
        x_row=wide.stride(0),
        x_token=wide.stride(1),
        x=wide,
        before=before,
        weight=taps,
        y=y,
        after=after,
        bias=None if bias is None else bias.to(dtype).contiguous(),
    )
    return y.to(x.dtype), after.to(state.dtype)


def gate(
    y: Tensor, z: Tensor, x: Tensor, D: Tensor, weight: Tensor, eps: float, groups: int
) -> Tensor:
    """See `longrnn.ops.norm.gated_rms_norm`."""
    dtype = torch.promote_types(y.dtype, torch.float32)
    (b, t, h, p), scanned = x.shape, y.to(dtype).contiguous()
    values, gates = (_tokens(one.to(dtype)) for one in (x.flatten(2), z))
    out = torch.empty_like(scanned)
    call(
        "gated_norm",
        dtype,
        tokens=b * t,
        h=h,
        p=p,
        groups=groups,
        eps=eps,
        scanned=scanned,
        x=values,
        x_token=values.stride(1),
        z=gates,
        z_token=gates.stride(1),
        D=D.to(dtype).contiguous(),
        weight=weight.to(dtype).contiguous(),
        y=out,
    )
    return out.flatten(2).to(z.dtype)


def _tokens(wide: Tensor) -> Tensor:
    """`(b, t, d)` with one distance between any two neighbouring tokens."""
    row, token, channel = wide.stride()
    return wide if channel == 1 and row == wide.shape[1] * token else wide.contiguous()


def cell(projected: Tensor, weights: Weights, state: Mamba2State) -> tuple[Tensor, Mamba2State]:
    """See `longrnn.ops.mamba2_layer.definition.cell`; a convolution of at most MOST_TAPS taps."""
    tensors = (projected, *weights[:6], *state)
    if not tracked(tensors):
        y, conv, ssm = _cell(tensors, weights[6:], None, None)
    else:
        y, conv, ssm = _Cell.apply(weights[6:], *tensors)
    return y, Mamba2State(conv, ssm)


def _cell(
    tensors: Sequence[Any], options: Sequence[Any], scanned: Tensor | None, kept: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    projected, *weights, conv, ssm = tensors
    ssm = ssm.contiguous()
    dtype = ssm.dtype
    given = [_mixed(one, dtype) for one in (projected, *weights, conv)]
    b, h, p, _n = ssm.shape
    # Not on torch's default device, which may be another one.
    y = projected.new_empty(b, projected.shape[1], h * p)
    conv_after, ssm_after = torch.empty_like(conv), torch.empty_like(ssm)
    written: list[Any] = [_mixed(one, dtype) for one in (conv_after, y)]
    names = ("projected", *Weights._fields[:6], "conv")
    call(
        "cell",
        dtype,
        **_cell_sizes(projected, weights[0], ssm, options),
        **dict(zip(names, given, strict=True)),
        state=ssm,
        state_after=ssm_after,
        conv_after=written[0],
        y=written[1],
        scanned=scanned,
        kept=kept,
        edit=None,
    )
    for own, wide in zip((conv_after, y), written, strict=True):
        if own is not wide:
            own.copy_(wide)
    return y, conv_after, ssm_after


def _cell_sizes(
    projected: Tensor, conv_weight: Tensor, ssm: Tensor, options: Sequence[Any]
) -> dict[str, Any]:
    (b, h, p, n), (groups, norm_eps, dt_limit) = ssm.shape, options
    return {
        "b": b,
        "t": projected.shape[1],
        "h": h,
        "p": p,
        "g": groups,
        "n": n,
        "k": conv_weight.shape[-1],
        "norm_eps": norm_eps,
        "segment": SEGMENT,
        "dt_least": dt_limit[0],
        "dt_largest": dt_limit[1],
    }


def _mixed(tensor: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """A tensor as the kernel of `cell` reads it: contiguous, in `dtype` or in bfloat16."""
    if tensor is None:
        return None
    narrow = tensor.dtype == torch.bfloat16 and dtype == torch.float32
    return (tensor if narrow else tensor.to(dtype)).contiguous()


class _Cell(torch.autograd.Function):
    """`cell` with its gradients."""

    @staticmethod
    def forward(
        ctx: Any, options: Sequence[Any], *tensors: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        projected, ssm = tensors[0], tensors[-1]
        assert projected is not None
        assert ssm is not None
        scanned = ssm.new_empty(*projected.shape[:2], ssm.shape[1] * ssm.shape[2])
        kept = kept_states(projected.shape[1], ssm)
        found = _cell(tensors, options, scanned, kept)
        # The output of the recurrence needs no more digits than the result has.
        ctx.save_for_backward(*tensors, scanned.to(found[0].dtype), kept)
        ctx.options = options
        ctx.set_materialize_grads(False)
        return found

    @staticmethod
    def backward(  # type: ignore[override]
        ctx: Any, grad_y: Tensor | None, *grads: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        refuse_second_derivatives()
        *tensors, scanned, kept = ctx.saved_tensors
        if grad_y is None and all(one is None for one in grads):
            return (None,) * (1 + len(tensors))
        grad_y = torch.zeros_like(scanned) if grad_y is None else grad_y

        def wide(one: Tensor | None) -> Tensor | None:
            return None if one is None else one.to(kept.dtype).contiguous()

        given = [wide(one) for one in tensors]
        found = [None if one is None else torch.empty_like(one) for one in given]
        names = ("projected", *Weights._fields[:6], "conv", "state")
        (b, t, channels), (_, h, p, _) = tensors[0].shape, tensors[-1].shape
        channels = tensors[-2].shape[2]
        # Per token: the convolution's output and its gradient, that of the recurrence, and five
        # numbers per head. A tensor, so that measurements of memory see it.
        work = kept.new_empty(b * t, 2 * channels + (p + 5) * h)
        call(
            "cell_gradient",
            kept.dtype,
            **_cell_sizes(tensors[0], tensors[1], tensors[-1], ctx.options),
            **dict(zip(names, given, strict=True)),
            **{f"grad_{name}": one for name, one in zip(names, found, strict=True)},
            scanned=wide(scanned),
            kept=kept,
            work=work,
            grad_y=wide(grad_y),
            grad_conv_after=wide(grads[0]),
            grad_state_after=wide(grads[1]),
        )
        pairs = zip(found, tensors, strict=True)
        return None, *(None if grad is None else grad.to(one.dtype) for grad, one in pairs)
