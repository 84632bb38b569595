"""A fixed random table of positions."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from longrnn.errors import UserError
from longrnn.positions.base import POSITIONS, PositionalEncoding
from longrnn.seeds import seeded
from longrnn.units import TokenCount


@POSITIONS.register("random")
class Random(PositionalEncoding):
    """e = table[position], random rows of unit norm that are not trained (arXiv 2402.00236).

    The table is saved in the checkpoint. A position past its end raises `UserError`.

    Args:
        d_model: width of e.
        max_length: number of positions.
        seed: random seed of the table.
        combine: `concat` or `add`.
    """

    table: Tensor

    def __init__(
        self,
        d_model: int,
        *,
        max_length: TokenCount = 128,
        seed: int = 0,
        combine: str = "concat",
    ) -> None:
        super().__init__(d_model, combine)
        if max_length < 1:
            raise UserError(f"max_length must be at least 1, not {max_length}: give a longer table")
        generator = seeded(seed)
        rows = torch.randn(max_length, d_model, generator=generator)
        self.register_buffer("table", F.normalize(rows, dim=-1))

    @property
    def n_positions(self) -> int:
        return len(self.table)

    def encode(self, x: Tensor, positions: Tensor) -> Tensor:
        return self.table[positions].to(x.dtype)
