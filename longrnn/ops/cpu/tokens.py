"""One or few tokens in C++, without gradients: stepwise cells, few rows, and whole stacks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from longrnn.ops.conv.definition import ConvState
from longrnn.ops.cpu.checks import MIXED, refusal, tracked
from longrnn.ops.cpu.library import TYPE_SUFFIXES, call, pack
from longrnn.ops.mamba2_layer.definition import Weights
from longrnn.ops.recent import Recent, extended

# `few_rows` reads each weight once for at most so many rows. Products with smaller weights take
# less time in torch than the call.
FEW_ROWS, FEW_WEIGHTS = 8, 2**13
# As in stepwise.h.
STEPWISE_CELLS = ("tanh", "relu", "identity", "gru", "lstm")


def stepwise_suits(*tensors: Tensor) -> bool:
    """Whether `stepwise` takes these tensors."""
    dtype = tensors[0].dtype
    same = dtype in TYPE_SUFFIXES and all(tensor.dtype == dtype for tensor in tensors)
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
        cell: one of `STEPWISE_CELLS`.
        projected: `(b, t, gates · d)`, W_ih x + b_ih, with the gates in the order of torch.nn.
        weight: `(gates · d, d)`, W_hh.
        bias: `(gates · d,)`, b_hh.
        h: `(b, d)`, the output before the first token.
        memory: `(b, d)`, c of an LSTM, h of the other cells.
        keep: factor of what every token keeps of the memory.
        add: factor of what it adds.
        limit: the largest norm of the memory, to which it is rescaled.

    Returns:
        h after each token `(b, t, d)`, and h and memory after the last token.
    """
    b, t, _ = projected.shape
    y = h.new_empty(b, t, h.shape[1])
    h, memory = h.contiguous(), memory.contiguous()
    h_after, memory_after = torch.empty_like(h), torch.empty_like(memory)
    call(
        "stepwise",
        h.dtype,
        cell=STEPWISE_CELLS.index(cell),
        b=b,
        t=t,
        d=h.shape[1],
        projected=projected.contiguous(),
        weight=weight.contiguous(),
        bias=bias.contiguous(),
        h=h,
        memory=memory,
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
    call("few_rows", None, rows=x.numel() // k, m=m, k=k, weight=weight, x=wide, y=y)
    return (y if bias is None else y + bias).to(x.dtype)


class Layer(NamedTuple):
    """x + out_proj(cell(in_proj(rms_norm(x)))) with a Mamba-2 cell, for `layers`.

    Attributes:
        in_weight: of the first projection.
        in_bias: of the first projection.
        out_weight: of the last projection.
        out_bias: of the last projection.
        norm: the weight of the norm.
        eps: of the norm.
        weights: of the cell.
        state: of one row without batch axis.
        edit: `(7, h)` float64, numbers per head in the order of `edited.h`; None for no edit.
        window: its tokens; None for no window.
        heads: the heads that have a window, int64.
    """

    in_weight: Tensor
    in_bias: Tensor | None
    out_weight: Tensor
    out_bias: Tensor | None
    norm: Tensor
    eps: float
    weights: Weights
    state: ConvState
    edit: Tensor | None
    window: int | None
    heads: Tensor

    @property
    def window_groups(self) -> int:
        """How many B a window remembers; see `ScanInputs.heads`."""
        heads, groups = self.state.ssm.shape[0], self.weights.groups
        return groups if len(self.heads) == heads or groups == 1 else len(self.heads)


class PackedLayers(NamedTuple):
    """`Layer`s as the kernel reads them; `memory` holds addresses of their tensors."""

    memory: Tensor
    layers: Sequence[Layer]


def pack_layers(layers: Sequence[Layer]) -> PackedLayers | None:
    """Packs layers of float32 states and of one shape; None for layers of several shapes."""
    if len({(layer.state.conv.shape, layer.state.ssm.shape) for layer in layers}) > 1:
        return None
    packed = b"".join(map(_packed, layers))
    return PackedLayers(torch.frombuffer(bytearray(packed), dtype=torch.uint8), layers)


def _packed(layer: Layer) -> bytes:
    """The `Layer` of `signatures`. What differs between calls is left out and set by the kernel."""
    weights, (h, p, n) = layer.weights, layer.state.ssm.shape
    narrow = torch.empty(0, dtype=layer.state.conv.dtype)  # for its dtype
    return pack(
        "Layer",
        torch.float32,
        t=1,
        h=h,
        p=p,
        g=weights.groups,
        n=n,
        k=weights.conv_weight.shape[1],
        norm_eps=weights.norm_eps,
        dt_least=weights.dt_limit[0],
        dt_largest=weights.dt_limit[1],
        **weights.tensors(),
        conv=narrow,
        conv_after=narrow,
        edit=layer.edit,
        count=0 if layer.window is None else len(layer.heads),
        groups=layer.window_groups,
        heads=layer.heads,
        x=narrow,
        B=narrow,
        d=len(layer.norm),
        eps=layer.eps,
        norm=layer.norm,
        in_weight=layer.in_weight,
        out_weight=layer.out_weight,
        in_bias=layer.in_bias,
        out_bias=layer.out_bias,
    )


class LayerState(NamedTuple):
    """State of one layer of `layers`; `recent` are the inputs of a window, or None without one."""

    conv: Tensor
    ssm: Tensor
    recent: Recent | None


class StatePlaces(NamedTuple):
    """Addresses of the state of a layer before and after a token: `States` in layers.h.

    Attributes:
        conv: last inputs of the convolution.
        conv_after: the same after the token.
        state: the recurrent state.
        state_after: the same after the token; 0 where every head has a window.
        x: of the window, with room for the token, as the following.
        B: see x.
        gain: see x.
        log_decay: see x.
        length: tokens of the window, with the new token.
        capacity: tokens that its memory has room for.
    """

    conv: int
    conv_after: int
    state: int
    state_after: int
    x: int = 0
    B: int = 0
    gain: int = 0
    log_decay: int = 0
    length: int = 0
    capacity: int = 0


def layers(
    packed: PackedLayers, x: Tensor, states: Sequence[LayerState], memory: Sequence[Tensor]
) -> tuple[Tensor, list[LayerState]]:
    """Computes one token per row by all layers, without gradients.

    Args:
        packed: of the layers.
        x: `(b, 1, d)`, b <= FEW_ROWS, in one of `MIXED`.
        states: of each layer.
        memory: for ssm after the token, of each layer.

    Returns:
        The output of the last layer in the dtype of x, and the state of each layer.
    """
    x = x.contiguous()
    conv = x.new_empty(len(states), *states[0].conv.shape, dtype=states[0].conv.dtype)
    before = [(state.conv.contiguous(), state.ssm.contiguous()) for state in states]
    after, places = list[LayerState](), list[int]()
    for layer, state, (conv_before, ssm_before), conv_after, ssm_after in zip(
        packed.layers, states, before, conv, memory, strict=True
    ):
        place = StatePlaces(
            conv_before.data_ptr(),
            conv_after.data_ptr(),
            ssm_before.data_ptr(),
            ssm_after.data_ptr(),
        )
        recent = None
        if layer.window is not None and state.recent is not None:
            recent = extended(state.recent, 1, layer.window)[1]
            place = _with_window(place, recent)
            if len(layer.heads) == ssm_after.shape[1]:  # no head changes it
                place, ssm_after = place._replace(state_after=0), ssm_before
        places += place
        after.append(LayerState(conv_after, ssm_after, recent))
    y, table = torch.empty_like(x), torch.tensor(places)
    call(
        "layers",
        None,
        count=len(states),
        rows=len(x),
        layers=packed.memory,
        states=table,
        x=x,
        x_after=y,
    )
    return y, after


def _with_window(place: StatePlaces, recent: Recent) -> StatePlaces:
    x = recent.x.entries
    return place._replace(
        x=x.data_ptr(),
        B=recent.B.entries.data_ptr(),
        gain=recent.gain.entries.data_ptr(),
        log_decay=recent.log_decay.entries.data_ptr(),
        length=x.shape[1],
        capacity=x.stride(0) // x.shape[2],
    )
