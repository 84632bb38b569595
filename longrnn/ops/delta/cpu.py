"""The gated delta rule in C++, without gradients: few tokens, or any number with decays per key."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from longrnn.ops.cpu.checks import tracked
from longrnn.ops.delta import definition
from longrnn.ops.scan.cpu import refusal, untracked
from longrnn.ops.scan.definition import FEW, ScanInputs

__all__ = ["delta", "refusal"]


def delta(inputs: ScanInputs, state: Tensor | None = None, **options: Any) -> tuple[Tensor, Tensor]:
    """See `longrnn.ops.delta.definition.delta`.

    It computes more than FEW tokens with decays per head, whose matrix products are fast in torch,
    and gradients.
    """
    if tracked((*inputs, state)) or (inputs.x.shape[1] > FEW and not inputs.has_key_decays):
        return definition.delta(inputs, state, **options)
    return untracked(inputs, state, "key_delta" if inputs.has_key_decays else "delta")
