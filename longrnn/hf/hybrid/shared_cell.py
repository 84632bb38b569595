"""`SharedCell` and `LayerCell`: cells on the weights of a Hugging Face layer."""

from functools import partial
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from longrnn.cells import Cell, ScanningCell
from longrnn.cells.weights import WHOLE, Part


class UnsupportedLayerError(ValueError):
    """A layer that the cell of its family does not compute; the message names the option."""


def of_layer(name: str) -> Any:
    """An attribute of a cell that is read from its layer, under that name there, in every use."""
    return property(attrgetter(f"layer.{name}"))


class SharedCell(ScanningCell):
    """A cell whose modules and parameters are those of a Hugging Face layer.

    Nothing is copied, and nothing is kept but the layer: a weight that is changed there, replaced
    by another tensor or extended by an adapter is the weight of this cell. Those that the cell
    reads are listed here, and in a subclass where their name in the layer differs.

    Args:
        theirs: the layer.
        family: its entry in `longrnn.hf.hybrid.families`.
    """

    layer: Any
    recurrent_weights = ("A_log", "dt_bias")
    rate_weight, bias_weight = "layer.A_log", "layer.dt_bias"
    A_log, dt_bias, D = of_layer("A_log"), of_layer("dt_bias"), of_layer("D")
    conv1d, norm, out_proj = of_layer("conv1d"), of_layer("norm"), of_layer("out_proj")

    def __init__(self, theirs: Any, family: Any) -> None:
        # Not the constructor of the cell, which would create weights.
        ScanningCell.__init__(self, theirs.hidden_size, theirs.hidden_size)
        activation = getattr(theirs, "activation", "silu")
        if activation not in ("silu", "swish"):
            raise UnsupportedLayerError(f"its activation is {activation}")
        self.layer, self._project, self._steps = theirs, family.project, family.steps

    @property
    def in_proj(self) -> Any:
        """What computes the input projections."""
        return self.layer.in_proj if self._project is None else partial(self._project, self.layer)

    @property
    def step_weights(self) -> dict[str, Part]:
        """Whole weights of the layer that its family names, or those of the cell."""
        own: dict[str, Part] = super().step_weights  # pyright: ignore
        parts = dict.fromkeys(self._steps, WHOLE) if self._steps else own
        return {f"layer.{name}": part for name, part in parts.items()}


class LayerCell(ScanningCell):
    """A scanning cell whose weights are those of a Hugging Face layer; nothing is copied.

    The layer returns its output and a state.

    Args:
        layer: the layer.
        width: of its input and output.
    """

    layer: Any
    repeats = False
    # Packed rows are read document by document, which suits any state.
    run_packed = Cell.run_packed

    def __init__(self, layer: Any, width: int) -> None:
        super().__init__(width, width)
        self.layer = layer

    def wide_dtype(self, weight: Tensor) -> torch.dtype:
        """The dtype of states, for weights like the given one."""
        return torch.promote_types(weight.dtype, torch.float32)
