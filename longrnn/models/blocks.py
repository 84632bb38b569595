"""A layer of a `RecurrentLM`: a cell, with or without a norm and a residual connection."""

from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from longrnn.cells import Cell, Edit
from longrnn.cells.observe import with_hooks
from longrnn.models.config import RecurrentConfig
from longrnn.ops.hooks import own_weight
from longrnn.ops.norm import rms_norm
from longrnn.ops.precision import autocasts, product_dtype
from longrnn.ops.rows import Rows
from longrnn.state import PyTree


class Block(nn.Module):
    """x + mixer(rms_norm(x)), or mixer(x) in a `plain` model, which has no norm.

    Attributes:
        gradient_checkpointing: whether the backward pass computes the layer again; transformers
            sets it too.
    """

    gradient_checkpointing = False

    def __init__(self, mixer: Cell, config: RecurrentConfig) -> None:
        super().__init__()
        residual = config.block == "residual"
        self.norm = nn.RMSNorm(config.d_model, eps=config.norm_eps) if residual else None
        self.mixer = mixer
        self.eps = config.norm_eps
        self.wide = config.residual_in_fp32

    def forward(
        self, x: Tensor, state: PyTree, edit: Edit | None = None, rows: Rows | None = None
    ) -> tuple[Tensor, PyTree]:
        """Returns the residual stream after the layer, and the state of its cell."""
        if not (self.gradient_checkpointing and torch.is_grad_enabled()):
            return self._run(x, state, edit, rows)
        # Inside the module, so that its hooks (shards, DDP) run with recomputation too.
        # Whether a hook observes the recurrence decides how it is computed.
        hooks = self.mixer.recurrence._forward_hooks.copy()
        pair: Any = checkpoint(
            self._run,
            x,
            state,
            edit,
            rows,
            use_reentrant=False,
            preserve_rng_state=False,
            context_fn=lambda: (nullcontext(), with_hooks(self.mixer.recurrence, hooks)),
        )
        return pair

    def _run(
        self, x: Tensor, state: PyTree, edit: Edit | None, rows: Rows | None
    ) -> tuple[Tensor, PyTree]:
        if self.norm is None:
            return self.mixer(x, state, edit, rows)
        normed = rms_norm(x, own_weight(self.norm), self.eps)
        if self.mixer.projections and autocasts(x):
            # The dtype of the first projection, which would cast it in another pass.
            normed = normed.to(product_dtype(x))
        elif self.wide:
            normed = normed.to(self.norm.weight.dtype)
        y, state = self.mixer(normed, state, edit, rows)
        return x + y, state
