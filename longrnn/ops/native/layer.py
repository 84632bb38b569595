"""One token of all residual layers of a model in C++: see `layer.h`.

A token of a small layer takes less time than the calls around it, whose code and data the weights
of each layer drive out of the caches. One call therefore computes all layers. What it reads of the
weights, their addresses and dtypes, is prepared once: `Prepared` must not be used after one of them
has changed, while their values may.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from longrnn.ops import native
from longrnn.ops.native.recycled import Recycled


class Projection(NamedTuple):
    """A linear layer: `weight` `(m, k)`, and `bias` `(m,)` or None."""

    weight: Tensor
    bias: Tensor | None


class Norm(NamedTuple):
    """An RMS norm: `weight` `(d,)`, and `eps`, added to the mean square."""

    weight: Tensor
    eps: float


class Layer(NamedTuple):
    """x + out_proj(cell(in_proj(norm(x)))) with a Mamba-2 cell, as the kernel reads it.

    Attributes:
        norm: of x.
        projections: before and after the cell.
        weights: see `native.Weights`.
        groups: see `native.cell`.
        norm_eps: see `native.cell`.
        dt_limit: see `native.cell`.
        conv: the last inputs of the convolution of one row, `(k − 1, c)`, on the meta device.
        state: the recurrent state of one row, `(h, p, n)`, on the meta device.
    """

    norm: Norm
    projections: tuple[Projection, Projection]
    weights: native.Weights
    groups: int
    norm_eps: float
    dt_limit: tuple[float, float]
    conv: Tensor
    state: Tensor

    def tensors(self) -> list[Tensor]:
        """All weights that the kernel reads."""
        given = [self.norm.weight, *self.weights]
        for projection in self.projections:
            given += projection
        return [one for one in given if one is not None]


MIXED = (torch.float32, torch.bfloat16)
Pair = tuple[Tensor, Tensor]  # conv `(b, k − 1, c)` and state `(b, h, p, n)` of a layer


def suits(layers: Sequence[Layer]) -> bool:
    """Whether `Prepared` takes these layers, gradients and devices aside."""
    return (
        native.available()
        and all(one.is_contiguous() for layer in layers for one in layer.tensors())
        and all(_is_known(layer) for layer in layers)
        and len({layer.state.shape for layer in layers}) == 1
    )


def _is_known(layer: Layer) -> bool:
    """Whether the kernel knows the dtypes and sizes of a layer."""
    return (
        all(one.dtype in MIXED for one in (*layer.tensors(), layer.conv))
        and layer.state.dtype == torch.float32
        and layer.weights.conv_weight.shape[-1] <= native.MOST_TAPS
    )


class Prepared:
    """The arguments of a call that depend on the weights alone.

    Args:
        layers: of which `suits` is true.
    """

    def __init__(self, layers: Sequence[Layer]) -> None:
        self._layers = (_layer_type() * len(layers))(*(_arguments(layer) for layer in layers))
        self._recycled = Recycled()
        self._width = len(layers[0].norm.weight)
        self._rows = [leaf.shape for layer in layers for leaf in (layer.conv, layer.state)]
        self._dtypes = [leaf.dtype for layer in layers for leaf in (layer.conv, layer.state)]

    def step(self, x: Tensor, states: Sequence[Pair]) -> tuple[Tensor, list[Pair]] | None:
        """All layers for one token per row.

        Args:
            x: `(b, 1, d)`, in one of `MIXED`.
            states: of each layer; they are not changed.

        Returns:
            The output of the last layer `(b, 1, d)` in the dtype of x, and the states after the
            token; None for states that the kernel cannot read.
        """
        flat = [leaf for pair in states for leaf in pair]
        if not 0 < len(x) <= native.FEW_ROWS or x.dtype not in MIXED or not self._reads(x, flat):
            return None
        x, before = x.contiguous(), [leaf.contiguous() for leaf in flat]
        states_after = self._recycled.take(len(states), before[1].shape)
        convs_after = [torch.empty_like(conv) for conv in before[::2]]
        after = [leaf for pair in zip(convs_after, states_after, strict=True) for leaf in pair]
        x_after = torch.empty_like(x)
        addresses = [leaf.data_ptr() for pair in zip(before, after, strict=True) for leaf in pair]
        packed = (ctypes.c_void_p * len(addresses))(*addresses)
        arguments = _Stack(
            len(states), len(x), ctypes.addressof(self._layers), ctypes.addressof(packed),
            *mixed(x), *mixed(x_after),
        )  # fmt: skip
        native.call("longrnn_layers", arguments)
        return x_after, list(zip(convs_after, states_after, strict=True))

    def _reads(self, x: Tensor, leaves: list[Tensor]) -> bool:
        """Whether the kernel can read x and the leaves of the states of its rows."""
        rows = len(x)
        return (
            x.shape[1:] == (1, self._width)
            and [leaf.dtype for leaf in leaves] == self._dtypes
            and [leaf.shape for leaf in leaves] == [(rows, *row) for row in self._rows]
            and native.readable((x, *leaves))
        )


def mixed(tensor: Tensor | None) -> tuple[int | None, bool]:
    """A tensor, or None, as the kernel reads it: its address, and whether it is bfloat16."""
    return (None, False) if tensor is None else (tensor.data_ptr(), tensor.dtype == torch.bfloat16)


def _arguments(layer: Layer) -> ctypes.Structure:
    """A `Layer` of `layer.h` but for what depends on the call."""
    (h, p, n), groups = layer.state.shape, layer.groups
    narrow_conv = None, layer.conv.dtype == torch.bfloat16
    return _layer_type()(
        0, 1, h, p, groups, n, layer.weights.conv_weight.shape[-1], groups,
        layer.norm_eps, *layer.dt_limit, None, None,
        None, 0, *(part for one in layer.weights for part in mixed(one)),
        *narrow_conv, *narrow_conv, None, 0,
        None, None, 0,
        len(layer.norm.weight), layer.norm.eps,
        *(part for one in layer.projections for part in _projection(one)),
        *mixed(layer.norm.weight), None, 0, None, 0,
    )  # fmt: skip


def _projection(one: Projection) -> tuple[int | bool | None, ...]:
    return native.FEW_KINDS[one.weight.dtype], one.weight.data_ptr(), *mixed(one.bias)


class _Stack(ctypes.Structure):
    _fields_ = [
        ("count", ctypes.c_long), ("b", ctypes.c_long),
        ("layers", ctypes.c_void_p), ("states", ctypes.c_void_p),
        ("x", ctypes.c_void_p), ("x_is_bfloat16", ctypes.c_long),
        ("x_after", ctypes.c_void_p), ("x_after_is_bfloat16", ctypes.c_long),
    ]  # fmt: skip


@cache
def _layer_type() -> type[ctypes.Structure]:
    def mixed_fields(name: str) -> list[tuple[str, type]]:
        return [(name, ctypes.c_void_p), (f"{name}_is_bfloat16", ctypes.c_long)]

    fields = [*native._cell_type(ctypes.c_float)._fields_]
    fields += [("d", ctypes.c_long), ("eps", ctypes.c_float)]
    for name in ("in", "out"):
        fields += [(f"{name}_kind", ctypes.c_long), (f"{name}_weight", ctypes.c_void_p)]
        fields += mixed_fields(f"{name}_bias")
    for name in ("layer_norm_weight", "x", "x_after"):
        fields += mixed_fields(name)
    return type("_Layer", (ctypes.Structure,), {"_fields_": fields})
