"""The gated delta rule in C++, without gradients: few tokens, or any number with decays per key."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from longrnn.ops.cpu.checks import tracked
from longrnn.ops.cpu.library import call
from longrnn.ops.delta import definition
from longrnn.ops.scan.cpu import readable, refusal, scan_by_key, scan_fields
from longrnn.ops.scan.definition import FEW, ScanInputs

__all__ = ["delta", "refusal"]


def delta(inputs: ScanInputs, state: Tensor | None = None, **options: Any) -> tuple[Tensor, Tensor]:
    """See `longrnn.ops.delta.definition.delta`.

    It computes more than FEW tokens with decays per head, whose matrix products are fast in torch,
    and gradients.
    """
    if inputs.has_key_decays and not tracked((*inputs, state)):
        return scan_by_key(inputs, state, "key_delta")
    if inputs.x.shape[1] > FEW or tracked((*inputs, state)):
        return definition.delta(inputs, state, **options)
    state = inputs.zero_state() if state is None else state
    given, before = readable(inputs, state, state.dtype)
    y, after = given.x.new_empty(given.x.shape), state.new_empty(state.shape)
    fields = scan_fields(given, before)
    call("delta", state.dtype, **fields, y=y, final_state=after, kept=None)
    return y, after
