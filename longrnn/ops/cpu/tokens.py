"""One or few tokens in C++, without gradients: stepwise cells, few rows, and whole stacks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from longrnn.ops.cpu.checks import MIXED, SEGMENT, refusal, tracked
from longrnn.ops.cpu.library import SUFFIXES, call, pack
from longrnn.ops.mamba2_layer.definition import Mamba2State, Weights
from longrnn.ops.recent import Recent, extended

# `few_rows` reads each weight once for at most so many rows. Products with smaller weights take
# less time in torch than the call.
FEW_ROWS, FEW_WEIGHTS = 4, 2**13
# As in stepwise.h.
CELLS = ("tanh", "relu", "identity", "gru", "lstm")


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
        x.dtype in MIXED
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
    sizes = {"rows": x.numel() // k, "m": m, "k": k}
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
        edit: `(7, h)` float64, numbers per head in the order of `edited.h`; None for no edit.
        window: its tokens; None for no window.
        heads: the heads that have a window, int64.
    """

    in_proj: tuple[Tensor, Tensor | None]
    out_proj: tuple[Tensor, Tensor | None]
    norm: Tensor
    eps: float
    weights: Weights
    state: Mamba2State
    edit: Tensor | None
    window: int | None
    heads: Tensor


class PackedLayers(NamedTuple):
    """`Layer`s as the kernel reads them; `memory` holds addresses of their tensors."""

    memory: Tensor
    layers: Sequence[Layer]


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
            edit=one.edit,
            **dict.fromkeys(("state", "state_after", "projected", "y", "scanned", "kept")),
            count=0 if one.window is None else len(one.heads),
            groups=_window_groups(one),
            length=0,
            capacity=0,
            heads=one.heads,
            x=narrow,
            B=narrow,
            **dict.fromkeys(("gain", "log_decay")),
            d=len(one.norm),
            eps=one.eps,
            norm=one.norm,
            in_weight=one.in_proj[0],
            out_weight=one.out_proj[0],
            in_bias=one.in_proj[1],
            out_bias=one.out_proj[1],
        )
    return PackedLayers(torch.frombuffer(packed, dtype=torch.uint8), all_layers)


def _window_groups(layer: Layer) -> int:
    """How many B a window remembers; see `ScanInputs.heads`."""
    h, groups = layer.state.ssm.shape[0], layer.weights.groups
    return groups if len(layer.heads) == h or groups == 1 else len(layer.heads)


class Tokens(NamedTuple):
    """State of one layer of `layers`; `recent` are the inputs of a window, or None without one."""

    conv: Tensor
    ssm: Tensor
    recent: Recent | None


def layers(
    packed: PackedLayers, x: Tensor, states: Sequence[Tokens], memory: Tensor
) -> tuple[Tensor, list[Tokens]]:
    """Computes one token per row by all layers, without gradients.

    Args:
        packed: of the layers.
        x: `(b, 1, d)`, b <= FEW_ROWS, in one of `MIXED`.
        states: of each layer.
        memory: for ssm after the token, of all layers.

    Returns:
        The output of the last layer in the dtype of x, and the state of each layer.
    """
    x = x.contiguous()
    conv = x.new_empty(len(states), *states[0].conv.shape, dtype=states[0].conv.dtype)
    before, after, addresses = [], [], []  # `before` keeps copies in memory
    for layer, state, own, ssm in zip(packed.layers, states, conv, memory, strict=True):
        given = state.conv.contiguous(), state.ssm.contiguous()
        before.append(given)
        places, recent = (0, 0, 0, 0, 0, 0), None
        if layer.window is not None and state.recent is not None:
            recent = extended(state.recent, 1, layer.window)[1]
            x_, gain, log_decay, B = (one.entries for one in recent)
            capacity = x_.stride(0) // x_.shape[2]
            places = *(one.data_ptr() for one in (x_, B, gain, log_decay)), x_.shape[1], capacity
            if len(layer.heads) == ssm.shape[1]:
                ssm = given[1]  # no head changes it
        ssm_after = 0 if ssm is given[1] else ssm.data_ptr()
        addresses += given[0].data_ptr(), own.data_ptr(), given[1].data_ptr(), ssm_after, *places
        after.append(Tokens(own, ssm, recent))
    y, table = torch.empty_like(x), torch.tensor(addresses)
    sizes = {"count": len(states), "rows": len(x), "layers": packed.memory, "states": table}
    call("layers", None, **sizes, x=x, x_after=y)
    return y, after
