"""Causal depthwise convolution over time with silu, and with an explicit state."""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from longrnn.ops.rows import Rows


class ConvState(NamedTuple):
    """The state of a cell with a convolution and a recurrence.

    Attributes:
        conv: `(b, d_conv − 1, c)`, the last inputs of the convolution.
        ssm: `(b, h, p, n)`, the memory of every head, float32 or wider.
    """

    conv: Tensor
    ssm: Tensor


def conv(
    x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor, rows: Rows | None = None
) -> tuple[Tensor, Tensor]:
    """silu of `causal_filter`, whose arguments it has."""
    y, last = causal_filter(x, weight, bias, state, rows)
    return F.silu(y).to(x.dtype), last


def causal_filter(
    x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor, rows: Rows | None = None
) -> tuple[Tensor, Tensor]:
    """Each channel's filter over the current token and the k − 1 before it.

    y_t = Σ_j weight[:, j] · x_{t−k+1+j} + bias, summed in float32 or wider.
    The taps are added one by one, so that any split gives the same bits.

    Args:
        x: `(b, t, c)`.
        weight: `(c, k)`; the last column is the weight of the current token.
        bias: `(c,)` or None.
        state: `(b, k − 1, c)`, the inputs that precede `x`.
        rows: where documents and padding begin; None for rows of one document without padding. No
            tap reads another document.

    Returns:
        `y` of shape `(b, t, c)` in float32 or wider, and the last k − 1 inputs in the dtype of
        `state`.
    """
    reach, time = state.shape[1], x.shape[1]
    dtype = torch.promote_types(torch.promote_types(x.dtype, weight.dtype), torch.float32)
    padded = torch.cat([state.to(x.dtype), x], dim=1)
    wide, taps = padded.to(dtype), weight.to(dtype).t()
    y = torch.zeros((), dtype=dtype, device=x.device) if bias is None else bias.to(dtype)
    for j, tap in enumerate(taps):
        inputs = wide[:, j : j + time]
        if rows is not None and rows.has_starts and j < reach:
            # Not a product with 0: what another document left may be NaN.
            inputs = torch.where((rows.since_start >= reach - j)[..., None], inputs, 0)
        y = torch.addcmul(y, inputs, tap)
    # A copy, because a slice would keep the whole input in memory.
    last = padded[:, time:].clone() if rows is None else rows.last(padded, reach)
    return y, last.to(state.dtype)
