"""No positional encoding."""

from __future__ import annotations

from torch import Tensor

from longrnn.positions.base import POSITIONS, PositionalEncoding


@POSITIONS.register("none")
class NoEncoding(PositionalEncoding):
    """x' = x.

    Args:
        d_model: width of x.
    """

    def __init__(self, d_model: int) -> None:
        super().__init__(d_model, "add")

    def encode(self, x: Tensor, positions: Tensor) -> Tensor:
        return x.new_zeros(())

    def forward(self, x: Tensor, positions: Tensor, *, checked: bool = False) -> Tensor:
        return x
