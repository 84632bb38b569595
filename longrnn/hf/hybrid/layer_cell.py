"""`LayerCell`: a scanning cell that exists as a layer of Hugging Face models only."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from longrnn.cells.base import Cell
from longrnn.cells.scanning import ScanningCell


class LayerCell(ScanningCell):
    """A scanning cell whose weights are those of a Hugging Face layer; nothing is copied.

    Args:
        layer: the layer.
        width: of its input and output.
    """

    layer: Any
    repeats = False
    # A hybrid runs rows of one document; this serves packed rows too, document by document.
    run_packed = Cell.run_packed

    def __init__(self, layer: Any, width: int) -> None:
        super().__init__(width, width)
        self.layer = layer

    def wide_dtype(self, weight: Tensor) -> torch.dtype:
        """The dtype of states, for weights like the given one."""
        return torch.promote_types(weight.dtype, torch.float32)
