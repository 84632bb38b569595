"""The step sizes of Mamba-2: dt = softplus(raw + bias), within a range."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional as F

UNLIMITED = (0.0, math.inf)


def step_sizes(raw: Tensor, bias: Tensor, limit: tuple[float, float], dtype: torch.dtype) -> Tensor:
    """softplus(raw + bias), clamped.

    Args:
        raw: `(b, t, h)`.
        bias: `(h,)`.
        limit: least and largest dt; `UNLIMITED` for none.
        dtype: of the result, float32 or float64.

    Returns:
        dt `(b, t, h)`.
    """
    dt = F.softplus(raw.to(dtype) + bias.to(dtype))
    return dt if limit == UNLIMITED else dt.clamp(*limit)
