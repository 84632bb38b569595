"""Root-mean-square normalisation, plain and gated."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / rms(x) · weight over the last axis (arXiv 1910.07467).

    Computed in float32 or wider, returned in the dtype of `x`.
    """
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    normed = F.rms_norm(wide, wide.shape[-1:], eps=eps)
    return (normed * weight).to(x.dtype)


def gated_rms_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float, groups: int) -> Tensor:
    """The output norm of Mamba-2: rms_norm(x · silu(gate)), separately for each group of channels.

    Args:
        x: `(b, t, d)`.
        gate: `(b, t, d)`.
        weight: `(d,)`.
        eps: added to the mean square.
        groups: number of groups, a divisor of d.
    """
    dtype = torch.promote_types(x.dtype, torch.float32)
    gated = x.to(dtype) * F.silu(gate.to(dtype))
    grouped = gated.unflatten(-1, (groups, -1))
    normed = F.rms_norm(grouped, grouped.shape[-1:], eps=eps).flatten(-2)
    return (normed * weight).to(gate.dtype)
