"""The gated delta rule in C++."""

from typing import Any

from torch import Tensor

from longrnn.ops.cpu.checks import tracked
from longrnn.ops.delta import definition
from longrnn.ops.scan.cpu import recurrence, refusal
from longrnn.ops.scan.inputs import ScanInputs

__all__ = ["delta", "limited", "refusal"]


def delta(inputs: ScanInputs, state: Tensor | None = None, **options: Any) -> tuple[Tensor, Tensor]:
    """See `longrnn.ops.delta.definition.delta`."""
    return recurrence("delta", inputs, state, **options)


def limited(inputs: ScanInputs, state: Tensor, limit: Tensor) -> tuple[Tensor, Tensor]:
    """See `longrnn.ops.delta.definition.limited`, which computes calls with gradients."""
    if tracked((*inputs.tensors(), state)):
        return definition.limited(inputs, state, limit, delta)
    return recurrence("delta", inputs, state, limit=limit)
