"""The gated norm, in operations that torch differentiates."""

import torch
from torch import Tensor
from torch.nn import functional as F


def gated_rms_norm(
    y: Tensor, z: Tensor, x: Tensor, D: Tensor, weight: Tensor, eps: float, groups: int
) -> Tensor:
    """The output gate of Mamba-2: rms_norm((y + D x) · silu(z)), per group of channels.

    Args:
        y: `(b, t, h, p)`, the output of the recurrence.
        z: `(b, t, h p)`.
        x: `(b, t, h, p)`, the input of the recurrence.
        D: `(h,)`.
        weight: `(h p,)`.
        eps: added to the mean square.
        groups: a divisor of h p.

    Returns:
        `(b, t, h p)` in the dtype of z, computed in float32 or wider.
    """
    dtype = torch.promote_types(y.dtype, torch.float32)
    inner = torch.addcmul(y.to(dtype), x.to(dtype), D.to(dtype)[:, None]).flatten(2)
    grouped = (inner * F.silu(z.to(dtype))).unflatten(-1, (groups, -1))
    normed = F.rms_norm(grouped, grouped.shape[-1:], eps=eps).flatten(-2)
    return (normed * weight).to(z.dtype)
