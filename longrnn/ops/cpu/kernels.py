"""The operations of `longrnn.ops.backend` in C++, and their gradients.

All compute in the dtype of the state, float32 or float64, and take and return tensors of any dtype.
Their callers ask `refusal` first. Gradients exist for `scan` and `cell`; a backward pass keeps the
inputs and one state per SEGMENT tokens, and computes everything else again. It cannot itself be
differentiated.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

from longrnn.errors import UserError
from longrnn.ops.conv import conv as torch_conv
from longrnn.ops.cpu.library import SUFFIXES, call, missing, pack
from longrnn.ops.limit import UNLIMITED, limited
from longrnn.ops.mamba2 import Mamba2State, Weights
from longrnn.ops.rows import Rows
from longrnn.ops.scan import FEW, ScanInputs
from longrnn.ops.transforms import is_transformed

SEGMENT = 512
# Taps of the convolution, as in parts.h.
MOST_TAPS = 16
# `few_rows` reads each weight once for at most so many rows. Products with smaller weights take
# less time in torch than the call.
FEW_ROWS, FEW_WEIGHTS = 4, 2**13
# As in few_rows.h and stepwise.h.
FEW_KINDS = {torch.float16: 0, torch.bfloat16: 1, torch.float32: 2}
# Dtypes that `cell` and `layers` read as they are.
MIXED = (torch.float32, torch.bfloat16)
CELLS = ("tanh", "relu", "identity", "gru", "lstm")
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
    inputs: ScanInputs, state: Tensor | None = None, *, final: bool = True
) -> tuple[Tensor, Tensor]:
    """See `longrnn.ops.scan.scan`."""
    few = inputs.x.shape[1] <= FEW
    if state is None and (few or tracked(inputs)):
        state = inputs.zero_state()
    tensors = (*inputs, state)
    if tracked(tensors):
        return _Scan.apply(*tensors)[:2]
    return _scan(tensors, final=final or few)


def _scan(
    tensors: Sequence[Tensor | None], kept: Tensor | None = None, *, final: bool = True
) -> tuple[Tensor, Tensor]:
    *_, state = tensors
    dtype = tensors[2].dtype if state is None else state.dtype  # type: ignore[union-attr]
    inputs, state = _scan_inputs(tensors, dtype)
    y = inputs.x.new_empty(inputs.x.shape)
    (b, _, h, p), n = inputs.x.shape, inputs.B.shape[3]
    after = inputs.x.new_empty(b, h, p, n) if final else None
    call("scan", dtype, **_scan_fields(inputs, state), y=y, final_state=after, kept=kept)
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
        **inputs._asdict(),
        "state": state,
    }


def _kept(tokens: int, state: Tensor) -> Tensor:
    """Memory for the states after each segment but the last."""
    return state.new_empty((tokens - 1) // SEGMENT, *state.shape)


class _Scan(torch.autograd.Function):
    """`scan`, and the states that its backward pass needs."""

    @staticmethod
    def forward(ctx: Any, *tensors: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        kept = _kept(tensors[0].shape[1], tensors[5])
        ctx.save_for_backward(*tensors, kept)
        ctx.mark_non_differentiable(kept)
        ctx.set_materialize_grads(False)
        return *_scan(tensors, kept), kept

    @staticmethod
    def backward(  # type: ignore[override]
        ctx: Any, grad_y: Tensor | None, grad_final: Tensor | None, _: None
    ) -> tuple[Tensor | None, ...]:
        _refuse_second_derivatives()
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


def conv(
    x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor, rows: Rows | None = None
) -> tuple[Tensor, Tensor]:
    """See `longrnn.ops.conv.conv`, which computes packed rows and long filters."""
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
    """See `longrnn.ops.mamba2.cell`; a convolution of at most MOST_TAPS taps."""
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
        kept = _kept(projected.shape[1], ssm)
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
        _refuse_second_derivatives()
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


def _refuse_second_derivatives() -> None:
    if torch.is_grad_enabled():
        raise UserError(
            "the C++ kernels have no second derivatives: load the model with backend='torch'"
        )


def stepwise_suits(*tensors: Tensor) -> bool:
    """Whether `stepwise` takes these tensors."""
    dtype = tensors[0].dtype
    same = dtype in SUFFIXES and all(one.dtype == dtype for one in tensors)
    return same and not tracked(tensors) and refusal(tensors) is None


def stepwise(
    cell: str,
    projected: Tensor,
    weight: Tensor,
    bias: Tensor,
    h: Tensor,
    memory: Tensor,
    *,
    keep: float = 1.0,
    add: float = 1.0,
    limit: float = math.inf,
) -> tuple[Tensor, Tensor, Tensor]:
    """Computes an RNN, a GRU or an LSTM, one token after another.

    Args:
        cell: one of `CELLS`.
        projected: `(b, t, gates · d)`, W_ih x + b_ih, with the gates in the order of torch.nn.
        weight: `(gates · d, d)`, W_hh.
        bias: `(gates · d,)`, b_hh.
        h: `(b, d)`, the output before the first token.
        memory: `(b, d)`, c of an LSTM, h of the other cells.
        keep: factor of what every token keeps of the memory.
        add: factor of what it adds.
        limit: the largest norm of the memory, to which it is rescaled.

    Returns:
        h after each token `(b, t, d)`, and h and memory after the last one.
    """
    (b, t, _), d = projected.shape, h.shape[1]
    given = [one.contiguous() for one in (projected, weight, bias, h, memory)]
    names = ("projected", "weight", "bias", "h", "memory")
    y, h_after, memory_after = h.new_empty(b, t, d), *(torch.empty_like(one) for one in given[3:])
    call(
        "stepwise",
        h.dtype,
        cell=CELLS.index(cell),
        b=b,
        t=t,
        d=d,
        **dict(zip(names, given, strict=True)),
        y=y,
        h_after=h_after,
        memory_after=memory_after,
        keep=keep,
        add=add,
        limit=limit,
    )
    return y, h_after, memory_after


def few_rows_suits(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Whether `few_rows` takes these tensors, and is the right choice for them."""
    return (
        x.dtype in FEW_KINDS
        and weight.dtype == x.dtype
        and x.shape[-1] == weight.shape[1]
        and 0 < x.numel() <= FEW_ROWS * weight.shape[1]
        and weight.numel() >= FEW_WEIGHTS
        and weight.is_contiguous()
        and not tracked((x, weight, bias))
        and not torch.is_autocast_enabled("cpu")
        and refusal((x, weight, bias)) is None
    )


def few_rows(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x weightᵀ + bias for at most FEW_ROWS rows, summed in float32.

    Args:
        x: `(…, k)`.
        weight: `(m, k)`.
        bias: `(m,)` or None.
    """
    m, k = weight.shape
    wide = x.to(torch.float32).contiguous()
    y = wide.new_empty(*x.shape[:-1], m)
    sizes = {"rows": x.numel() // k, "m": m, "k": k, "kind": FEW_KINDS[weight.dtype]}
    call("few_rows", None, **sizes, weight=weight, x=wide, y=y)
    return (y if bias is None else y + bias).to(x.dtype)


class Layer(NamedTuple):
    """x + out_proj(cell(in_proj(rms_norm(x)))) with a Mamba-2 cell, for `layers`.

    Attributes:
        in_proj: weight and bias.
        out_proj: weight and bias.
        norm: the weight of the norm.
        eps: of the norm.
        weights: of the cell.
        state: of one row without batch axis.
    """

    in_proj: tuple[Tensor, Tensor | None]
    out_proj: tuple[Tensor, Tensor | None]
    norm: Tensor
    eps: float
    weights: Weights
    state: Mamba2State


class PackedLayers(NamedTuple):
    """`Layer`s as the kernel reads them; `memory` holds addresses of their weights."""

    memory: Tensor
    state: Mamba2State


def pack_layers(all_layers: Sequence[Layer]) -> PackedLayers | None:
    """Packs layers of float32 states and of one shape; None for layers of several shapes."""
    if len({(one.state.conv.shape, one.state.ssm.shape) for one in all_layers}) > 1:
        return None
    packed = bytearray()
    for one in all_layers:
        h, p, n = one.state.ssm.shape
        names = Weights._fields[:6]
        narrow = torch.empty(0, dtype=one.state.conv.dtype)  # its address is set in each call
        packed += pack(
            "Layer",
            torch.float32,
            b=0,
            t=1,
            h=h,
            p=p,
            g=one.weights.groups,
            n=n,
            k=one.weights.conv_weight.shape[1],
            norm_eps=one.weights.norm_eps,
            dt_least=one.weights.dt_limit[0],
            dt_largest=one.weights.dt_limit[1],
            **dict(zip(names, one.weights[:6], strict=True)),
            conv=narrow,
            conv_after=narrow,
            segment=SEGMENT,
            **dict.fromkeys(("state", "state_after", "projected", "y", "scanned", "kept")),
            d=len(one.norm),
            eps=one.eps,
            norm=one.norm,
            in_kind=FEW_KINDS[one.in_proj[0].dtype],
            in_weight=one.in_proj[0],
            out_kind=FEW_KINDS[one.out_proj[0].dtype],
            out_weight=one.out_proj[0],
            in_bias=one.in_proj[1],
            out_bias=one.out_proj[1],
        )
    return PackedLayers(torch.frombuffer(packed, dtype=torch.uint8), all_layers[0].state)


def layers(
    packed: PackedLayers, x: Tensor, states: Sequence[Mamba2State], after: Tensor
) -> tuple[Tensor, Sequence[Tensor], Sequence[Tensor]]:
    """Computes one token per row by all layers, without gradients.

    Args:
        packed: of the layers.
        x: `(b, 1, d)`, b <= FEW_ROWS, in one of `MIXED`.
        states: of each layer.
        after: memory for ssm after the token, of all layers.

    Returns:
        The output of the last layer in the dtype of x, and conv and ssm of each layer.
    """
    x = x.contiguous()
    before = [(one.conv.contiguous(), one.ssm.contiguous()) for one in states]
    conv = x.new_empty(len(states), *states[0].conv.shape, dtype=states[0].conv.dtype).unbind()
    ssm = after.unbind()
    addresses = [
        one.data_ptr()
        for (c, s), c_after, s_after in zip(before, conv, ssm, strict=True)
        for one in (c, c_after, s, s_after)
    ]
    y, table = torch.empty_like(x), torch.tensor(addresses)
    sizes = {"count": len(states), "rows": len(x), "layers": packed.memory, "states": table}
    call("layers", None, **sizes, x=x, x_after=y)
    return y, conv, ssm
