"""The layers of a `RecurrentLM`: a cell, with or without a norm and a residual connection."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from longrnn.mixers import Edit, Mixer
from longrnn.mixers.context import Share, run_share
from longrnn.models.config import RecurrentConfig
from longrnn.models.recompute import recomputed
from longrnn.ops.hooks import own_weight, unhooked
from longrnn.ops.native.layer import Layer, Norm
from longrnn.ops.norm import add_rms_norm
from longrnn.ops.packed_rows import PackedRows
from longrnn.ops.precision import autocasts, product_dtype
from longrnn.state import PyTree


class Residual(NamedTuple):
    """The residual stream between two layers, as a sum that the next norm computes.

    Attributes:
        x: `(b, t, d)`.
        branch: `(b, t, d)`, the output of the last cell; None if x is the sum already.
    """

    x: Tensor
    branch: Tensor | None = None

    @classmethod
    def of(cls, stream: Tensor | Residual) -> Residual:
        """A residual stream, added up or not."""
        return stream if isinstance(stream, Residual) else cls(stream)

    def sum(self) -> Tensor:
        """The residual stream, `(b, t, d)`."""
        return self.x if self.branch is None else self.x + self.branch

    def from_token(self, first: int) -> Residual:
        """Without the tokens before `first`."""
        branch = None if self.branch is None else self.branch[:, first:]
        return Residual(self.x[:, first:], branch) if first else self


class Block(nn.Module, ABC):
    """One layer of the model.

    Attributes:
        recompute: whether the backward pass computes the layer again.
    """

    recompute = False

    mixer: Mixer

    @abstractmethod
    def run(self, before: Residual, *cell: Any) -> tuple[Residual, PyTree]:
        """Returns the residual stream after the layer, and the state of its cell.

        Args:
            before: the residual stream before it.
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
        before: Tensor | Residual,
        state: PyTree,
        edit: Edit | None,
        rows: PackedRows | None = None,
        share: Share | None = None,
    ) -> tuple[Tensor | Residual, PyTree]:
        """Returns the residual stream after the layer, in the form in which it was given."""
        cell = state, edit, rows, share
        if isinstance(before, Residual):
            return self.run(before, *cell)
        if self.recompute:
            # Inside the module, so that its hooks (shards, DDP) run as without recomputation.
            return recomputed(self._added, before, *cell)
        return self._added(before, *cell)

    def _added(self, x: Tensor, *cell: Any) -> tuple[Tensor, PyTree]:
        """`run`, from a tensor to a tensor."""
        after, state = self.run(Residual(x), *cell)
        return after.sum(), state


class ResidualBlock(Block):
    """x + mixer(rms_norm(x))."""

    def __init__(self, mixer: Mixer, config: RecurrentConfig) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(config.d_model, eps=config.norm_eps)
        self.mixer = mixer
        self.eps = config.norm_eps
        self.wide = config.residual_in_fp32

    def native_layer(self) -> Layer | None:
        return self.mixer.residual_layer(Norm(own_weight(self.norm), self.eps))

    def run(self, before: Residual, *cell: Any) -> tuple[Residual, PyTree]:
        dtype = self._input_dtype(before.x)
        x, normed = add_rms_norm(*before, own_weight(self.norm), self.eps, dtype=dtype)
        y, state = self.cell(normed, *cell)
        return Residual(x, y), state

    def _input_dtype(self, x: Tensor) -> torch.dtype | None:
        """The dtype of the cell's input; None for that of the residual stream."""
        if self.mixer.projections and autocasts(x):
            # That of the first projection, which would cast it in another pass.
            return product_dtype(x)
        return self.norm.weight.dtype if self.wide else None


class PlainBlock(Block):
    """The cell without norm and residual connection."""

    def __init__(self, mixer: Mixer, config: RecurrentConfig) -> None:
        super().__init__()
        self.mixer = mixer

    def run(self, before: Residual, *cell: Any) -> tuple[Residual, PyTree]:
        y, state = self.cell(before.sum(), *cell)
        return Residual(y), state


BLOCKS: dict[str, type[ResidualBlock] | type[PlainBlock]] = {
    "residual": ResidualBlock,
    "plain": PlainBlock,
}


def deferred(blocks: nn.ModuleList, x: Tensor) -> Tensor | Residual:
    """The input of the first of some `Block`s, in the form in which they pass the stream on.

    That is a `Residual` where nothing else reads it. Hooks read and change tensors, and blocks that
    are recomputed keep their input, which is one tensor once it is added up.
    """
    recompute = any(block.recompute for block in blocks)
    return x if recompute or not unhooked(*blocks) else Residual(x)
