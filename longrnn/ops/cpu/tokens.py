"""One or few tokens in C++, without gradients: stepwise cells, few rows, and whole stacks."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from longrnn.ops.conv.definition import ConvState
from longrnn.ops.cpu.checks import MIXED, refusal, tracked
from longrnn.ops.cpu.library import TYPE_SUFFIXES, call, pack
from longrnn.ops.cpu.signatures import FEW_ROWS
from longrnn.ops.scan.recent import Recent, extended

# Products of few rows with smaller weights take less time in torch than the call.
FEW_WEIGHTS = 2**13
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
    (b, t, _), d = projected.shape, h.shape[1]
    tensors = {"projected": projected, "weight": weight, "bias": bias, "h": h, "memory": memory}
    y, h_after, memory_after = h.new_empty(b, t, d), h.new_empty(b, d), h.new_empty(b, d)
    call(
        "stepwise",
        h.dtype,
        cell=STEPWISE_CELLS.index(cell),
        b=b,
        t=t,
        d=d,
        keep=keep,
        add=add,
        limit=limit,
        **{name: tensor.contiguous() for name, tensor in tensors.items()},
        y=y,
        h_after=h_after,
        memory_after=memory_after,
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


class PackedLayer(NamedTuple):
    """x + out_proj(cell(in_proj(rms_norm(x)))), for `layers`.

    Attributes:
        content: a layer of `signatures`, with the addresses of its tensors.
        edit: `(k, h)` float64, the rows of `NUMBERS`; None for no edit.
        window: its tokens; None for no window.
        heads: the heads that have a window, int64.
        groups: how many B the window remembers per token.
    """

    content: bytes
    edit: Tensor | None
    window: int | None
    heads: Tensor
    groups: int


class PackedLayers(NamedTuple):
    """Layers of one shape; `memory` is the content of all of them, which `kernel` reads."""

    kernel: str
    memory: Tensor
    layers: Sequence[PackedLayer]


def layers(
    packed: PackedLayers,
    x: Tensor,
    states: Sequence[ConvState],
    recents: Sequence[Recent | None],
    memory: Sequence[Tensor],
) -> tuple[Tensor, list[ConvState], list[Recent | None]]:
    """Computes one token per row by all layers, without gradients.

    Args:
        packed: of the layers.
        x: `(b, 1, d)`, b <= FEW_ROWS, in one of `MIXED`.
        states: of the cell of each layer.
        recents: inputs of the window of each layer; None without one.
        memory: for ssm after the token, of each layer.

    Returns:
        The output of the last layer in the dtype of x, and `states` and `recents` after the token.
    """
    x = x.contiguous()
    conv = x.new_empty(len(states), *states[0].conv.shape, dtype=states[0].conv.dtype)
    before = [ConvState(state.conv.contiguous(), state.ssm.contiguous()) for state in states]
    after, recents_after, places = list[ConvState](), list[Recent | None](), list[bytes]()
    for layer, state, recent, conv_after, ssm_after in zip(
        packed.layers, before, recents, conv, memory, strict=True
    ):
        changed: Tensor | None = ssm_after
        window = dict[str, Any]()
        if layer.window is not None and recent is not None:
            recent = extended(recent, 1, layer.window)[1]
            window = _window(layer, recent)
            if len(layer.heads) == state.ssm.shape[1]:  # no head changes it
                changed, ssm_after = None, state.ssm
        place = pack(
            "States",
            torch.float32,
            conv=state.conv,
            conv_after=conv_after,
            state=state.ssm,
            state_after=changed,
            **window,
        )
        places.append(place)
        after.append(ConvState(conv_after, ssm_after))
        recents_after.append(recent)
    y = torch.empty_like(x)
    call(
        packed.kernel,
        None,
        count=len(states),
        rows=len(x),
        layers=packed.memory,
        states=joined(places),
        x=x,
        x_after=y,
    )
    return y, after, recents_after


def joined(structs: Sequence[bytes]) -> Tensor:
    """Packed structs one after another."""
    return torch.frombuffer(bytearray(b"".join(structs)), dtype=torch.uint8)


def _window(layer: PackedLayer, recent: Recent) -> dict[str, Any]:
    """The `Window` of `signatures`; the last of its tokens is to be written."""
    x = recent.x.entries
    return {
        "count": len(layer.heads),
        "groups": layer.groups,
        "heads": layer.heads,
        "x": x,
        "B": recent.B.entries,
        "gain": recent.gain.entries,
        "decay": recent.decay.entries,
        "length": x.shape[1],
        "capacity": x.stride(0) // x.shape[2],
    }
