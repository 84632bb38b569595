"""`LayerCell`: a scanning cell that exists as a layer of Hugging Face models only."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from longrnn.cells.base import Cell, EditedState
from longrnn.cells.edit import Edit, Steps
from longrnn.cells.scanning import ScanningCell
from longrnn.ops.backend import choose
from longrnn.ops.rows import Rows
from longrnn.ops.scan.definition import ScanInputs
from longrnn.state import PyTree


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
        self.layer, self.backend = layer, "auto"

    def wide_dtype(self, weight: Tensor) -> torch.dtype:
        """The dtype of states, for weights like the given one."""
        return torch.promote_types(weight.dtype, torch.float32)

    def run(
        self, x: Tensor, state: PyTree, edit: Edit | None, rows: Rows | None = None
    ) -> tuple[Tensor, PyTree]:
        own, recent = state if isinstance(state, EditedState) else (state, None)
        remembered = [] if recent is None else [one.entries for one in recent]
        steps, rest = self.before(x, own)
        ops = choose(self.backend, (x, steps.x, *remembered))
        extra = []

        def inputs(steps: Steps, log_decay: Tensor, add: Tensor | None) -> ScanInputs:
            given, more = self.inputs(steps, log_decay, add, rest)
            extra.append(more)
            return given

        y, memory, recent = self.scan(steps, inputs, (own.ssm, recent), edit, ops, rows)
        y, after = self.after(y, rest, extra[0], memory)
        return y, after if recent is None else EditedState(after, recent)
