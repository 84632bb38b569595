"""`time_scales`: changes the weights that determine how long each head remembers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from longrnn.cells import Cell, Edit
from longrnn.mitigations.base import MITIGATIONS, Mitigation
from longrnn.mitigations.values import Finite


@MITIGATIONS.register("time_scales")
class TimeScales(Mitigation):
    """log |A|' = log |A| + rate, and dt' = softplus(… + dt_bias + bias), by head.

    In an LSTM or a GRU, `bias` is added to the bias of the forget gate (f, or z): the larger, the
    longer it remembers. A change of weights alone costs nothing, and `longrnn convert` folds it
    into them. `longrnn calibrate --method fit` finds the numbers by gradients.

    Args:
        rate: a number, a list by layer, or lists by layer and head; 0 changes nothing.
        bias: likewise. A head may have a list by key or unit in the place of a number.
        layers: see `Mitigation`.
        heads: see `Mitigation`.
        diagnosis: see `Mitigation`.
    """

    rate: Finite = 0.0
    bias: Finite = 0.0

    @classmethod
    def undefined(cls, cell: type[Cell]) -> str | None:
        if cell.rate_weight is None and cell.bias_weight is None:
            return "no weight of it sets time scales alone; use state_norm"
        return None

    def bind(self, layer: int, heads: Tensor) -> Edit:
        return Edit(
            rate=_additions(self.rate, layer, heads), bias=_additions(self.bias, layer, heads)
        )


def _additions(value: Any, layer: int, heads: Tensor) -> Tensor | None:
    """The additions of the heads of a layer, `(h, 1)` or `(h, k)` float64; None for none."""
    if isinstance(value, list):
        value = value[layer]
    if value in (None, 0.0):
        return None
    by_head = value if isinstance(value, list) else [value] * len(heads)
    width = max(len(number) if isinstance(number, list) else 1 for number in by_head)
    rows = [number if isinstance(number, list) else [number or 0.0] * width for number in by_head]
    return torch.tensor(rows, dtype=torch.float64).where(heads[:, None], 0.0)
