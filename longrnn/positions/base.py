"""The interface of a positional encoding, and how it is combined with the token vectors."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor, nn

from longrnn.errors import UserError
from longrnn.registry import Registry


class PositionalEncoding(nn.Module, ABC):
    """x' = [x, e] (`concat`) or x + e (`add`), where e is the encoding.

    The constructor of every encoding takes `d_model`, the width of x and of e; options are
    keyword-only.
    """

    def __init__(self, d_model: int, combine: str) -> None:
        super().__init__()
        if combine not in ("concat", "add"):
            raise UserError(f"unknown combine {combine!r}: use 'concat' or 'add'")
        self.d_model, self.combine = d_model, combine

    @property
    def d_output(self) -> int:
        """Width of x'."""
        return 2 * self.d_model if self.combine == "concat" else self.d_model

    @property
    def n_positions(self) -> int | None:
        """How many positions exist; None for any number."""
        return None

    @abstractmethod
    def encode(self, x: Tensor, positions: Tensor) -> Tensor:
        """Computes the encoding e.

        Args:
            x: `(b, t, d)`, the token vectors.
            positions: `(b, t)` int64, absolute, from 0, below `n_positions` if there is one.

        Returns:
            `(b, t, d)` in the dtype of `x`.
        """

    def forward(self, x: Tensor, positions: Tensor, *, checked: bool = False) -> Tensor:
        """Computes x'.

        Args:
            x: `(b, t, d)`, the token vectors.
            positions: `(b, t)` int64, absolute, from 0.
            checked: whether all positions are known to exist, but for rows on which nothing
                depends. Comparing them with `n_positions` would wait for the device.

        Raises:
            UserError: a position past the end of the table.
        """
        if self.n_positions is not None:
            if not checked:
                _check_end(positions, self.n_positions)
            # Rows that have ended may be past the end of the table.
            positions = positions.clamp(max=self.n_positions - 1)
        encoding = self.encode(x, positions)
        return torch.cat([x, encoding], dim=-1) if self.combine == "concat" else x + encoding

    def extra_repr(self) -> str:
        return f"d_model={self.d_model}, combine={self.combine}"


def _check_end(positions: Tensor, count: int) -> None:
    """Raises a `UserError` for a position past the end of a table of `count` positions."""
    last = int(positions.max())
    if last >= count:
        raise UserError(
            f"position {last} is past the end of the table of {count} positions: build the "
            f"model with position.max_length of at least {last + 1}, or use 'sinusoidal'"
        )


POSITIONS: Registry[PositionalEncoding] = Registry("position")
