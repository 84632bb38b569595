"""The `Mamba` cell on the weights of the layers of Jamba and Zamba."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor

from longrnn.cells import Mamba
from longrnn.hf.hybrid.shared_cell import SharedCell


class SharedMamba(SharedCell, Mamba):
    """A `Mamba` cell on the weights of a layer; see `SharedCell`."""

    recurrent_weights = ("layer.A_log",)
    shared: ClassVar = {
        name: name for name in ("A_log", "D", "conv1d", "x_proj", "dt_proj", "out_proj")
    }

    def __init__(self, theirs: Any, family: Any) -> None:
        super().__init__(theirs, family)
        self.n_heads, self.n_groups = theirs.intermediate_size, 1
        self.d_state, self.d_conv = theirs.ssm_state_size, theirs.conv_kernel_size
        self.dt_rank, self.select_norm_eps = theirs.time_step_rank, None


class SharedJamba(SharedMamba):
    """The same for a Jamba (arXiv 2403.19887), whose norms of δ, B and C have weights."""

    def normed(self, delta: Tensor, B: Tensor, C: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        layer = self.layer
        return layer.dt_layernorm(delta), layer.b_layernorm(B), layer.c_layernorm(C)


class SharedZamba(SharedMamba):
    """The same for a Zamba (arXiv 2405.16712), whose groups of channels select on their own."""

    wide_weights = ("A_log", "D", "dt_proj_bias")
    shared: ClassVar = {name: name for name in ("conv1d", "out_proj", "dt_proj_bias")}
    bias_weight = "dt_proj_bias"

    def __init__(self, theirs: Any, family: Any) -> None:
        super().__init__(theirs, family)
        self.n_groups = theirs.n_mamba_heads

    @property
    def A_log(self) -> Tensor:  # noqa: N802
        return self.layer.A_log.flatten(0, 1)

    @property
    def D(self) -> Tensor:  # noqa: N802
        return self.layer.D.flatten()

    def select(self, x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
        layer, sizes = self.layer, [self.dt_rank, self.d_state, self.d_state]
        by_group = x.unflatten(-1, (self.n_groups, -1))
        selected = torch.einsum("btgp,grp->btgr", by_group, layer.x_proj_weight)
        delta, B, C = selected.split(sizes, dim=-1)
        dt = torch.einsum("btgr,gpr->btgp", delta, layer.dt_proj_weight)
        return (dt.to(dtype) + layer.dt_proj_bias.to(dtype)).flatten(2), B.to(dtype), C.to(dtype)
