"""`SharedCell` and `LayerCell`: cells on the weights of a Hugging Face layer."""

from __future__ import annotations

from functools import partial
from operator import attrgetter
from typing import Any, ClassVar

import torch
from torch import Tensor

from longrnn.cells import Cell, ScanningCell
from longrnn.cells.weights import WHOLE, Part


class UnsupportedLayerError(ValueError):
    """A layer that the cell of its family does not compute; the message names the option."""


class SharedCell(ScanningCell):
    """A cell whose modules and parameters are those of a Hugging Face layer.

    Nothing is copied, and nothing is kept but the layer: a weight that is changed there, replaced
    by another tensor or extended by an adapter is the weight of this cell.

    Args:
        theirs: the layer.
        family: its entry in `longrnn.hf.hybrid.families`.

    Attributes:
        renamed: modules and parameters that have another name in the layer, and that name.
    """

    layer: Any
    recurrent_weights = ("A_log", "dt_bias")
    renamed: ClassVar[dict[str, str]] = {}

    def __init__(self, theirs: Any, family: Any) -> None:
        # Not the constructor of the cell, which would create weights.
        ScanningCell.__init__(self, theirs.hidden_size, theirs.hidden_size)
        activation = getattr(theirs, "activation", "silu")
        if activation not in ("silu", "swish"):
            raise UnsupportedLayerError(f"its activation is {activation}")
        self.layer, self._project, self._steps = theirs, family.project, family.steps
        self.rate_weight, self.bias_weight, self.dt_weight = (
            name and f"layer.{self.renamed.get(name, name)}"
            for name in (self.rate_weight, self.bias_weight, self.dt_weight)
        )

    @property
    def step_weights(self) -> dict[str, Part]:
        """Whole weights of the layer that its family names, or those of the cell."""
        if self._steps:
            return dict.fromkeys((f"layer.{name}" for name in self._steps), WHOLE)
        own: dict[str, Part] = super().step_weights  # pyright: ignore
        return {f"layer.{self.renamed.get(name, name)}": part for name, part in own.items()}

    def __getattr__(self, name: str) -> Any:
        """What the cell itself does not have is read from the layer, in every use."""
        if name in ("layer", "recurrence"):
            return super().__getattr__(name)
        if name == "in_proj" and self._project is not None:
            return partial(self._project, self.layer)
        return attrgetter(self.renamed.get(name, name))(self.layer)


class LayerCell(ScanningCell):
    """A scanning cell whose weights are those of a Hugging Face layer; nothing is copied.

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
