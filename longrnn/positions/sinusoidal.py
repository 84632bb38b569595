"""Sinusoidal positional encoding of unit norm."""

from __future__ import annotations

import torch
from torch import Tensor

from longrnn.errors import UserError
from longrnn.positions.base import POSITIONS, PositionalEncoding


@POSITIONS.register("sinusoidal")
class Sinusoidal(PositionalEncoding):
    """e = [sin(f_k · position), cos(f_k · position)] / sqrt(d / 2), f_k = 10000^(−2k/d).

    Unit norm and order as in arXiv 2402.00236. It is computed from the position, so it is defined
    for any position.

    Args:
        d_model: width of e, even.
        combine: `concat` or `add`.
    """

    def __init__(self, d_model: int, *, combine: str = "concat") -> None:
        super().__init__(d_model, combine)
        if d_model % 2:
            raise UserError(
                f"sinusoidal positions need an even d_model, not {d_model}: set an even one"
            )

    def encode(self, x: Tensor, positions: Tensor) -> Tensor:
        # float64, because float32 loses the phase of positions in the millions.
        k = torch.arange(self.d_model // 2, device=x.device, dtype=torch.float64)
        angle = positions[..., None].double() * 10000.0 ** (-2 * k / self.d_model)
        return (torch.cat([angle.sin(), angle.cos()], -1) / (self.d_model / 2) ** 0.5).to(x.dtype)
