"""The state after the same inputs were read again and again.

One pass over inputs takes a state h to a h + b, with a = exp(Σ log_decay), so that k passes take it
to a^k h + b (1 − a^k) / (1 − a): any number of passes costs one.
"""

from __future__ import annotations

import torch
from torch import Tensor

# Σ log_decay of a pass that decays nothing: (1 − a^k) / (1 − a) is then k to rounding.
LEAST = -1e-30


def repeated(before: Tensor, after: Tensor, log_decay: Tensor, times: Tensor) -> Tensor:
    """The state after `times` passes, from that before and after the first one.

    Args:
        before: `(b, h, p, n)`.
        after: the same, after one pass.
        log_decay: `(b, h)`, summed over the pass, at most 0.
        times: `(b,)`, at least 1; 1 gives `after` up to rounding.

    Returns:
        `(b, h, p, n)`, differentiable in everything but `times`.
    """
    once = log_decay.clamp(max=LEAST)
    all_times = times[:, None].to(once) * once
    passes = torch.expm1(all_times) / torch.expm1(once)  # b h
    added = after - once.exp()[..., None, None] * before
    return all_times.exp()[..., None, None] * before + passes[..., None, None] * added
