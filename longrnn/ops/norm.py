"""Root-mean-square normalisation."""

import torch
from torch import Tensor
from torch.nn import functional as F

from longrnn.ops.transforms import recomputed


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / rms(x) · weight over the last axis (arXiv 1910.07467).

    Computed in float32 or wider, returned in the dtype of `x`. The backward pass computes it again:
    torch's own would keep the normed tensor beside the input.
    """
    return recomputed(_rms_norm, x, weight, eps)


def _rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return (F.rms_norm(wide, x.shape[-1:], eps=eps) * weight).to(x.dtype)
