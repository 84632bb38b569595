"""One token of a whole residual layer in C++: see `layer.h`.

A token of a small layer takes less time than the calls around it: eleven calls of torch and of
kernels become one.
"""

from __future__ import annotations

import ctypes
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from longrnn.ops import native


class Stored(NamedTuple):
    """The weights of a linear layer as they are stored.

    Attributes:
        weight: `(m, k)`; if int8, each row is multiplied by its scale.
        bias: `(m,)` or None.
        scale: `(m,)` float32, of an int8 weight; None for other weights.
    """

    weight: Tensor
    bias: Tensor | None
    scale: Tensor | None = None


class Norm(NamedTuple):
    """An RMS norm: `weight` `(d,)`, and `eps`, added to the mean square."""

    weight: Tensor
    eps: float


MIXED = (torch.float32, torch.bfloat16)


def suits(
    x: Tensor,
    norm: Norm,
    projections: tuple[Stored, Stored],
    weights: native.Weights,
    conv: Tensor,
    state: Tensor,
) -> bool:
    """Whether `step` takes these tensors."""
    read = (*weights, *projections[0], *projections[1])
    given = [x, norm.weight, conv, state, *(one for one in read if one is not None)]
    return (
        x.shape[1] == 1
        and len(x) <= native.FEW_ROWS
        and weights.conv_weight.shape[-1] <= native.MOST_TAPS
        and all(stored.weight.is_contiguous() for stored in projections)
        and all(one.dtype in MIXED or one.dtype == torch.int8 for one in given)
        and not native.tracked(given)
        and native.readable(given)
        and not torch.is_autocast_enabled("cpu")
        and native.available()
    )


def step(
    x: Tensor,
    norm: Norm,
    projections: tuple[Stored, Stored],
    weights: native.Weights,
    conv: Tensor,
    state: Tensor,
    *,
    groups: int,
    norm_eps: float,
    dt_limit: tuple[float, float],
) -> tuple[Tensor, Tensor, Tensor] | None:
    """x + out_proj(cell(in_proj(norm(x)))) for one token per row, and a Mamba-2 cell.

    Args:
        x: `(b, 1, d)`.
        norm: of x.
        projections: before and after the cell.
        weights: see `native.Weights`.
        conv: see `native.cell`.
        state: `(b, h, p, n)` float32.
        groups: see `native.cell`.
        norm_eps: see `native.cell`.
        dt_limit: see `native.cell`.

    Returns:
        The sum `(b, 1, d)` in the dtype of x, and both states; None if the cell's output is not
        finite.
    """
    b, h, p, n = state.shape
    x, state, conv = x.contiguous(), state.contiguous(), conv.contiguous()
    # Contiguous copies, if any, must live until the call returns.
    given = [None if one is None else one.contiguous() for one in weights]
    x_after, conv_after = torch.empty_like(x), torch.empty_like(conv)
    state_after = torch.empty_like(state)
    arguments = _layer_type()(
        b, 1, h, p, groups, n, weights.conv_weight.shape[-1], groups,
        norm_eps, *dt_limit,
        state.data_ptr(), state_after.data_ptr(),
        None, 0, *(part for one in (*given, conv, conv_after) for part in mixed(one)), None, 0,
        None, None, 0,
        x.shape[-1], norm.eps,
        *(part for stored in projections for part in _projection(stored)),
        *mixed(norm.weight), *mixed(x), *mixed(x_after),
    )  # fmt: skip
    if not native.call("longrnn_layer", arguments):
        return None
    return x_after, conv_after, state_after


def mixed(tensor: Tensor | None) -> tuple[int | None, bool]:
    """A tensor, or None, as the kernel reads it: its address, and whether it is bfloat16."""
    return (None, False) if tensor is None else (tensor.data_ptr(), tensor.dtype == torch.bfloat16)


def _projection(stored: Stored) -> tuple[int | bool | None, ...]:
    scale = None if stored.scale is None else stored.scale.data_ptr()
    kind = native.FEW_KINDS[stored.weight.dtype]
    return kind, stored.weight.data_ptr(), scale, *mixed(stored.bias)


@cache
def _layer_type() -> type[ctypes.Structure]:
    def mixed_fields(name: str) -> list[tuple[str, type]]:
        return [(name, ctypes.c_void_p), (f"{name}_is_bfloat16", ctypes.c_long)]

    fields = [*native._cell_type(ctypes.c_float)._fields_]
    fields += [("d", ctypes.c_long), ("eps", ctypes.c_float)]
    for name in ("in", "out"):
        fields += [(f"{name}_kind", ctypes.c_long), (f"{name}_weight", ctypes.c_void_p)]
        fields += [(f"{name}_scale", ctypes.c_void_p), *mixed_fields(f"{name}_bias")]
    for name in ("layer_norm_weight", "x", "x_after"):
        fields += mixed_fields(name)
    return type("_Layer", (ctypes.Structure,), {"_fields_": fields})
