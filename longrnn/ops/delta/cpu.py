"""The gated delta rule in C++, without gradients."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from longrnn.ops.cpu.checks import tracked
from longrnn.ops.delta import definition
from longrnn.ops.scan.cpu import refusal, untracked
from longrnn.ops.scan.definition import ScanInputs

__all__ = ["delta", "refusal"]


def delta(inputs: ScanInputs, state: Tensor | None = None, **options: Any) -> tuple[Tensor, Tensor]:
    """See `longrnn.ops.delta.definition.delta`, which computes gradients."""
    if tracked((*inputs, state)):
        return definition.delta(inputs, state, **options)
    return untracked(inputs, state, "key_delta" if inputs.has_key_decays else "delta")
