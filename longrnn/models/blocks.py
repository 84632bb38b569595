"""The layers of a `RecurrentLM`: a cell, with or without a norm and a residual connection."""

from __future__ import annotations

from abc import ABC, abstractmethod
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from longrnn.mixers import Edit, Mixer
from longrnn.models.config import RecurrentConfig
from longrnn.models.recompute import recomputed
from longrnn.ops.native.layer import Layer, Norm
from longrnn.ops.norm import rms_norm
from longrnn.ops.packed_rows import PackedRows
from longrnn.ops.precision import autocasts, product_dtype
from longrnn.state import PyTree


class Block(nn.Module, ABC):
    """One layer of the model.

    Attributes:
        recompute: whether the backward pass computes the layer again.
    """

    recompute = False

    mixer: Mixer

    @abstractmethod
    def run(self, x: Tensor, *cell: Any) -> tuple[Tensor, PyTree]:
        """Returns the residual stream after the layer, and the state of its cell.

        Args:
            x: the residual stream before it.
            cell: the other arguments of the cell.
        """

    def native_layer(self) -> Layer | None:
        """What the C++ kernel reads to compute one token of the layer; None without a kernel."""
        return None

    def forward(
        self,
        x: Tensor,
        state: PyTree,
        edit: Edit | None,
        rows: PackedRows | None = None,
    ) -> tuple[Tensor, PyTree]:
        """Returns the residual stream after the layer, and the state of its cell."""
        # Inside the module, so that its hooks (shards, DDP) run as without recomputation.
        run = partial(recomputed, self.run) if self.recompute else self.run
        return run(x, state, edit, rows)


class ResidualBlock(Block):
    """x + mixer(rms_norm(x))."""

    def __init__(self, mixer: Mixer, config: RecurrentConfig) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(config.d_model, eps=config.norm_eps)
        self.mixer = mixer
        self.eps = config.norm_eps
        self.wide = config.residual_in_fp32

    def native_layer(self) -> Layer | None:
        return self.mixer.residual_layer(Norm(self.norm.weight, self.eps))

    def run(self, x: Tensor, *cell: Any) -> tuple[Tensor, PyTree]:
        normed = rms_norm(x, self.norm.weight, self.eps).to(self._input_dtype(x))
        y, state = self.mixer(normed, *cell)
        return x + y, state

    def _input_dtype(self, x: Tensor) -> torch.dtype:
        """The dtype of the cell's input."""
        if self.mixer.projections and autocasts(x):
            # That of the first projection, which would cast it in another pass.
            return product_dtype(x)
        return self.norm.weight.dtype if self.wide else x.dtype


class PlainBlock(Block):
    """The cell without norm and residual connection."""

    def __init__(self, mixer: Mixer, config: RecurrentConfig) -> None:
        super().__init__()
        self.mixer = mixer

    def run(self, x: Tensor, *cell: Any) -> tuple[Tensor, PyTree]:
        return self.mixer(x, *cell)


BLOCKS: dict[str, type[ResidualBlock] | type[PlainBlock]] = {
    "residual": ResidualBlock,
    "plain": PlainBlock,
}
