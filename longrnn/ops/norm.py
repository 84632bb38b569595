"""Root-mean-square normalisation, plain and gated."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from longrnn.ops.transforms import is_transformed


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / rms(x) · weight over the last axis (arXiv 1910.07467).

    Computed in float32 or wider, returned in the dtype of `x`. The backward pass computes it again:
    torch's own would keep the normed tensor beside the input.
    """
    if torch.is_grad_enabled() and not is_transformed():
        found = checkpoint(_rms_norm, x, weight, eps, use_reentrant=False, preserve_rng_state=False)
        assert found is not None
        return found
    return _rms_norm(x, weight, eps)


def _rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return (F.rms_norm(wide, x.shape[-1:], eps=eps) * weight).to(x.dtype)


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
