"""A copy of the token vector: the control for the doubled width of the other encodings."""

from __future__ import annotations

from torch import Tensor

from longrnn.positions.base import POSITIONS, PositionalEncoding


@POSITIONS.register("duplicate")
class Duplicate(PositionalEncoding):
    """e = x: as wide as a positional encoding, without information about the position.

    Args:
        d_model: width of x.
        combine: `concat` or `add`.
    """

    def __init__(self, d_model: int, *, combine: str = "concat") -> None:
        super().__init__(d_model, combine)

    def encode(self, x: Tensor, positions: Tensor) -> Tensor:
        return x
