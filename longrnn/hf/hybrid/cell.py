"""`SharedMamba2`: the `Mamba2` mixer on the weights of a Hugging Face layer."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from longrnn.hf.hybrid.families import CannotReplaceError, Family
from longrnn.mixers import Mamba2, ScanningMixer
from longrnn.mixers.mamba2 import Mamba2State
from longrnn.ops.ssd import select

# What a `Mamba2` has, and this mixer reads from the layer in every use.
SHARED = ("A_log", "dt_bias", "D", "conv1d", "norm", "out_proj")


class SharedMamba2(Mamba2):
    """A `Mamba2` mixer whose modules and parameters are those of a Hugging Face layer.

    Nothing is copied, and nothing is kept but the layer: a weight that is changed there, replaced
    by another tensor or extended by an adapter is the weight of this mixer.

    Args:
        theirs: the layer.
        family: its architecture.

    Raises:
        CannotReplaceError: the layer computes something else.
    """

    layer: Any

    def __init__(self, theirs: Any, family: Family) -> None:
        # Not the constructor of Mamba2, which would create weights.
        ScanningMixer.__init__(self, theirs.hidden_size, theirs.hidden_size)
        self.layer, self._family = theirs, family
        if theirs.activation not in ("silu", "swish"):
            raise CannotReplaceError(f"its convolution has the activation {theirs.activation}")
        if hasattr(theirs, "_hf_hook"):
            raise CannotReplaceError("its weights are moved between devices by accelerate")
        for name in ("in_proj", "out_proj"):
            if not getattr(theirs, name).weight.is_floating_point():
                raise CannotReplaceError(f"the weights of its {name} are quantised")
        self.n_heads, self.head_dim = theirs.num_heads, theirs.head_dim
        self.d_inner, self.d_state = theirs.intermediate_size, theirs.ssm_state_size
        self.n_groups, self.d_conv = theirs.n_groups, theirs.conv_kernel_size
        if self.d_inner != self.n_heads * self.head_dim:
            raise CannotReplaceError(
                f"its inner width {self.d_inner} is not {self.n_heads} heads × {self.head_dim}"
            )
        self.d_xBC = self.d_inner + 2 * self.n_groups * self.d_state
        least, largest = theirs.time_step_limit
        self.dt_limit = float(least), float(largest)
        self.backend, self.ssd = "auto", select("auto")
        self._gate = family.gate(theirs)
        self.norm_eps = getattr(theirs.norm, "variance_epsilon", 0.0)
        # The kernel has one number of groups for B, C and the norm.
        groups = getattr(self._gate, "groups", 0)
        self._fits_kernel = self._gate.fused and groups == self.n_groups

    def __getattr__(self, name: str) -> Any:
        if name in SHARED:
            return getattr(self.layer, name)
        if name == "in_proj":
            return self._family.projection(self.layer)
        return super().__getattr__(name)

    def gated(self, y: Tensor, z: Tensor, inner: Tensor, backend: str) -> Tensor:
        if self._fits_kernel:
            return super().gated(y, z, inner, backend)
        y = torch.addcmul(y.unflatten(2, inner.shape[2:]), inner, self.D[:, None]).flatten(2)
        return self._gate(y, z)

    def _fused(self, projected: Tensor, state: Mamba2State) -> tuple[Tensor, Mamba2State] | None:
        return super()._fused(projected, state) if self._fits_kernel else None
