"""The recurrence one token at a time, as the paper states it (arXiv 2405.21060, section 2)."""

from __future__ import annotations

import torch
from torch import Tensor

from longrnn.ops.precision import own_precision
from longrnn.ops.ssd.base import ScanInputs, decayed


def ssd(inputs: ScanInputs, state: Tensor) -> tuple[Tensor, Tensor]:
    """See `longrnn.ops.ssd.base.SSD`. In float64 it is the reference for the other backends."""
    with own_precision(state):
        return _loop(inputs, state)


def _loop(inputs: ScanInputs, state: Tensor) -> tuple[Tensor, Tensor]:
    inputs = ScanInputs(*(tensor.to(state.dtype) for tensor in inputs))
    x, log_decay = inputs.scaled_x(state.dtype), inputs.log_decay
    B, C = inputs.per_head(inputs.B), inputs.per_head(inputs.C)
    outputs = []
    for x_t, l_t, B_t, C_t in zip(*(i.unbind(1) for i in (x, log_decay, B, C)), strict=True):
        state = decayed(state, l_t) + x_t[..., :, None] * B_t[..., None, :]
        outputs.append((state @ C_t[..., :, None])[..., 0])
    return torch.stack(outputs, dim=1), state
