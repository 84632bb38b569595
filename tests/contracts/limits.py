"""The definition of the recurrence with a limit on the norm of the state, for tests."""

from __future__ import annotations

import torch
from longrnn.ops.ssd import ScanInputs
from longrnn.ops.ssd.rescale import UNLIMITED
from torch import Tensor


def limited_loop(inputs: ScanInputs, state: Tensor, limits: Tensor) -> tuple[Tensor, Tensor]:
    """h_t = ĥ_t · min(1, p / ‖ĥ_t‖), ĥ_t the state of the plain recurrence, in float64.

    Args:
        inputs: see `ScanInputs`.
        state: `(b, h, p, n)`.
        limits: `(h,)` float64.

    Returns:
        y `(b, t, h, p)` and the final state.
    """
    x, gain, log_decay, B, C = (tensor.double() for tensor in inputs)
    B, C = (tensor.repeat_interleave(x.shape[2] // B.shape[2], dim=2) for tensor in (B, C))
    h, p, y = state.double(), limits[:, None, None], []
    for t in range(x.shape[1]):
        added = (gain[:, t, :, None] * x[:, t])[..., None] * B[:, t, :, None]
        h = log_decay[:, t].exp()[..., None, None] * h + added
        scale = (p / h.flatten(2).norm(dim=-1)[..., None, None]).clamp(max=1)
        h = torch.where(p < UNLIMITED, h * scale, h)
        y.append((h @ C[:, t, :, :, None])[..., 0])
    return torch.stack(y, 1), h
