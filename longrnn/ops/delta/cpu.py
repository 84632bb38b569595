"""The gated delta rule in C++, with its gradient, which cannot itself be differentiated."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from longrnn.ops.scan.cpu import recurrence, refusal
from longrnn.ops.scan.definition import ScanInputs

__all__ = ["delta", "refusal"]


def delta(inputs: ScanInputs, state: Tensor | None = None, **options: Any) -> tuple[Tensor, Tensor]:
    """See `longrnn.ops.delta.definition.delta`."""
    return recurrence("key_delta" if inputs.has_key_decays else "delta", inputs, state, **options)
