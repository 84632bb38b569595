"""The layers of a `RecurrentLM`: a cell, with or without a norm and a residual connection."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from torch import Tensor, nn

from longrnn.mixers import Edit, Mixer
from longrnn.mixers.context import Share, run_share
from longrnn.models.config import RecurrentConfig
from longrnn.models.recompute import recomputed
from longrnn.ops.native.layer import Layer, Norm
from longrnn.ops.norm import rms_norm
from longrnn.ops.packed_rows import PackedRows
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
        """Returns the output of the layer, and the state of its cell.

        Args:
            x: `(b, t, d)`.
            cell: the other arguments of `cell`.
        """

    def native_layer(self) -> Layer | None:
        """What the C++ kernel reads to compute one token of the layer; None without a kernel."""
        return None

    def cell(
        self,
        x: Tensor,
        state: PyTree,
        edit: Edit | None,
        rows: PackedRows | None,
        share: Share | None,
    ) -> tuple[Tensor, PyTree]:
        """Runs the cell; on a share of the rows, if there is one, from a `SharedState`."""
        if share is None:
            return self.mixer(x, state, edit, rows)
        return run_share(self.mixer, x, state, edit, share)

    def forward(
        self,
        x: Tensor,
        state: PyTree,
        edit: Edit | None,
        rows: PackedRows | None = None,
        share: Share | None = None,
    ) -> tuple[Tensor, PyTree]:
        if self.recompute:
            # Inside the module, so that its hooks (shards, DDP) run as without recomputation.
            return recomputed(self.run, x, state, edit, rows, share)
        return self.run(x, state, edit, rows, share)


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
        normed = rms_norm(x, self.norm.weight, self.eps)
        if self.wide:
            normed = normed.to(self.norm.weight.dtype)
        y, state = self.cell(normed, *cell)
        return x + y, state


class PlainBlock(Block):
    """The cell without norm and residual connection."""

    def __init__(self, mixer: Mixer, config: RecurrentConfig) -> None:
        super().__init__()
        self.mixer = mixer

    def run(self, x: Tensor, *cell: Any) -> tuple[Tensor, PyTree]:
        return self.cell(x, *cell)


BLOCKS: dict[str, type[ResidualBlock] | type[PlainBlock]] = {
    "residual": ResidualBlock,
    "plain": PlainBlock,
}
