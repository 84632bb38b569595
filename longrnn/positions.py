"""Positional encodings of the absolute positions that the state counts."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from longrnn.errors import UserError
from longrnn.options import Seed, Tokens
from longrnn.registry import Registry
from longrnn.seeds import seeded

Combine = Literal["concat", "add"]
POSITIONS: Registry[PositionalEncoding] = Registry("position")


class PositionalEncoding(nn.Module, ABC):
    """x' = [x, e] (`concat`) or x + e (`add`), where e is the encoding.

    The constructor of every encoding takes `d_model`, the width of x and of e; options are
    keyword-only.

    Attributes:
        n_positions: how many positions exist; None for any number.
    """

    n_positions: int | None = None

    def __init__(self, d_model: int, *, combine: Combine = "concat") -> None:
        super().__init__()
        self.d_model, self.combine = d_model, combine

    @property
    def d_output(self) -> int:
        """Width of x'."""
        return 2 * self.d_model if self.combine == "concat" else self.d_model

    @abstractmethod
    def encode(self, x: Tensor, positions: Tensor) -> Tensor:
        """Computes the encoding e.

        Args:
            x: `(b, t, d)`, the token vectors.
            positions: `(b, t)` int64, absolute, from 0, below `n_positions` if that is a number.

        Returns:
            `(b, t, d)` in the dtype of `x`.
        """

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        """Computes x'.

        Args:
            x: `(b, t, d)`, the token vectors.
            positions: `(b, t)` int64, absolute, from 0.

        Raises:
            UserError: a position past the end of the table.
        """
        if self.n_positions is not None and (last := int(positions.max())) >= self.n_positions:
            raise UserError(
                f"position {last} is past the end of the table of {self.n_positions} positions: "
                f"build the model with position.max_length of at least {last + 1}, or use "
                "'sinusoidal'"
            )
        encoding = self.encode(x, positions)
        return torch.cat([x, encoding], dim=-1) if self.combine == "concat" else x + encoding


@POSITIONS.register("none")
class NoEncoding(PositionalEncoding):
    """x' = x.

    Args:
        d_model: width of x.
    """

    def __init__(self, d_model: int) -> None:
        super().__init__(d_model, combine="add")

    def encode(self, x: Tensor, positions: Tensor) -> Tensor:
        return x.new_zeros(())

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        return x


@POSITIONS.register("sinusoidal")
class Sinusoidal(PositionalEncoding):
    """e = [sin(f_k · position), cos(f_k · position)] / sqrt(d / 2), f_k = 10000^(−2k/d).

    Unit norm and order as in arXiv 2402.00236. It is computed from the position, so it is defined
    for any position.

    Args:
        d_model: width of e, even.
        combine: `concat` or `add`.
    """

    def __init__(self, d_model: int, *, combine: Combine = "concat") -> None:
        super().__init__(d_model, combine=combine)
        if d_model % 2:
            raise UserError(
                f"sinusoidal positions need an even d_model, not {d_model}: set an even number"
            )

    def encode(self, x: Tensor, positions: Tensor) -> Tensor:
        # float64, because float32 loses the phase of positions in the millions.
        k = torch.arange(self.d_model // 2, device=x.device, dtype=torch.float64)
        angle = positions[..., None].double() * 10000.0 ** (-2 * k / self.d_model)
        return (torch.cat([angle.sin(), angle.cos()], -1) / (self.d_model / 2) ** 0.5).to(x.dtype)


class Table(PositionalEncoding):
    """e = table[position], the rows of a parameter or buffer `table`."""

    table: Tensor

    def encode(self, x: Tensor, positions: Tensor) -> Tensor:
        return self.table[positions].to(x.dtype)


@POSITIONS.register("learned")
class Learned(Table):
    """e = table[position], entries drawn from N(0, 1) (arXiv 2402.00236) and trained.

    A position past the end of the table raises `UserError`.

    Args:
        d_model: width of e.
        max_length: number of positions.
        combine: `concat` or `add`.
    """

    def __init__(
        self, d_model: int, *, max_length: Tokens = 128, combine: Combine = "concat"
    ) -> None:
        super().__init__(d_model, combine=combine)
        self.n_positions = max_length
        self.table = nn.Parameter(torch.randn(max_length, d_model))


@POSITIONS.register("random")
class Random(Table):
    """e = table[position], random rows of unit norm that are not trained (arXiv 2402.00236).

    The table is saved in the checkpoint. A position past its end raises `UserError`.

    Args:
        d_model: width of e.
        max_length: number of positions.
        seed: random seed of the table.
        combine: `concat` or `add`.
    """

    def __init__(
        self, d_model: int, *, max_length: Tokens = 128, seed: Seed = 0, combine: Combine = "concat"
    ) -> None:
        super().__init__(d_model, combine=combine)
        self.n_positions = max_length
        rows = torch.randn(max_length, d_model, generator=seeded(seed))
        self.register_buffer("table", F.normalize(rows, dim=-1))


@POSITIONS.register("duplicate")
class Duplicate(PositionalEncoding):
    """e = x: as wide as a positional encoding, without information about the position.

    Args:
        d_model: width of x.
        combine: `concat` or `add`.
    """

    def encode(self, x: Tensor, positions: Tensor) -> Tensor:
        return x
