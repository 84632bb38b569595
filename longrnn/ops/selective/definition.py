"""The selective scan of Mamba-1 (arXiv 2312.00752): every key of a channel decays at its own rate.

    h_t = exp(step_t rate + log_keep) h_{t−1} + gain_t x_t B_t,   y_t = h_t · C_t

for every channel, with h `(n,)`. It is the recurrence of `longrnn.ops.scan` with heads of one
channel and decays per key, which here are not made for all tokens.
"""

from __future__ import annotations

from typing import NamedTuple

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
