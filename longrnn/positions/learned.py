"""A learned table of positions."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from longrnn.errors import UserError
from longrnn.positions.base import POSITIONS, PositionalEncoding
from longrnn.units import TokenCount


@POSITIONS.register("learned")
class Learned(PositionalEncoding):
    """e = table[position], entries drawn from N(0, 1) (arXiv 2402.00236) and trained.

    A position past the end of the table raises `UserError`.

    Args:
        d_model: width of e.
        max_length: number of positions.
        combine: `concat` or `add`.
    """

    def __init__(
        self, d_model: int, *, max_length: TokenCount = 128, combine: str = "concat"
    ) -> None:
        super().__init__(d_model, combine)
        if max_length < 1:
            raise UserError(f"max_length must be at least 1, not {max_length}: give a longer table")
        self.table = nn.Parameter(torch.randn(max_length, d_model))

    @property
    def n_positions(self) -> int:
        return len(self.table)

    def encode(self, x: Tensor, positions: Tensor) -> Tensor:
        return self.table[positions].to(x.dtype)
