"""Causal depthwise convolution over time, with an explicit state."""

from __future__ import annotations

import torch
from torch import Tensor


def causal_conv(
    x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor
) -> tuple[Tensor, Tensor]:
    """Convolves each channel with its own filter over the present and the k − 1 tokens before.

    y_t = Σ_j weight[:, j] · x_{t−k+1+j} (+ bias). The sum is written out: for the widths in use
    (k = 4) that is faster on a CPU than `conv1d`, in every dtype, and exact at every split.

    Args:
        x: `(b, t, c)`.
        weight: `(c, k)`, the last column belongs to the present token.
        bias: `(c,)` or None.
        state: `(b, k − 1, c)`, the inputs before `x`.

    Returns:
        `y` of shape `(b, t, c)` and the state after the last token, in the dtype of `state`.
    """
    time = x.shape[1]
    padded = torch.cat([state.to(x.dtype), x], dim=1)
    # Contiguous rows: a strided one would keep the products from being vectorised.
    taps = weight.t().contiguous().unbind()
    first = padded[:, :time]
    y = first * taps[0] if bias is None else torch.addcmul(bias, first, taps[0])
    for j, tap in enumerate(taps[1:], start=1):
        y = y.addcmul_(padded[:, j : j + time], tap)
    # The copy lets go of the segment that the slice would keep in memory.
    return y, padded[:, time:].to(state.dtype, copy=True)
