"""The selective scan of Mamba-1 (arXiv 2312.00752): every key of a channel decays at its own rate.

    h_t = exp(step_t rate + log_keep) h_{t−1} + gain_t x_t B_t,   y_t = h_t · C_t

for every channel, with h `(n,)`. It is the recurrence of `longrnn.ops.scan` with heads of one
channel and decays per key, which here are not made for all tokens.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class SelectiveInputs(NamedTuple):
    """Inputs of the selective scan.

    Attributes:
        x: `(b, t, h)`.
        gain: `(b, t, h)`, of x.
        step: `(b, t, h)`, of the decay, at least 0; infinite where a document begins.
        rate: `(h, n)`, below 0.
        log_keep: `(h,)`, at most 0, added to every log decay, which has no gradient; or None.
        B: `(b, t, g, n)`; channel i reads group i // (h / g).
        C: `(b, t, g, n)`.
    """

    x: Tensor
    gain: Tensor
    step: Tensor
    rate: Tensor
    log_keep: Tensor | None
    B: Tensor
    C: Tensor


def loop(inputs: SelectiveInputs, state: Tensor) -> tuple[Tensor, Tensor]:
    """Computes one token after another.

    Args:
        inputs: t >= 1.
        state: `(b, h, n)`, float32 or float64.

    Returns:
        y `(b, t, h)`, and the state after the last token.
    """
    x, gain, step, rate, log_keep, B, C = inputs
    B, C = (keys.repeat_interleave(x.shape[2] // B.shape[2], 2) for keys in (B, C))
    outputs = []
    for t in range(x.shape[1]):
        log_decay = step[:, t, :, None] * rate
        log_decay = log_decay if log_keep is None else log_decay + log_keep[:, None]
        state = log_decay.exp() * state + (gain[:, t] * x[:, t])[..., None] * B[:, t]
        outputs.append((state * C[:, t]).sum(-1))
    return torch.stack(outputs, dim=1), state
