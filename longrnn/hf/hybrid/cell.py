"""`SharedMamba2`: the `Mamba2` cell on the weights of a Hugging Face layer."""

from __future__ import annotations

from typing import Any

from longrnn.cells import Mamba2, ScanningCell
from longrnn.hf.hybrid.families import CannotReplaceError, Family

# What a `Mamba2` has, and this cell reads from the layer in every use.
SHARED = ("A_log", "dt_bias", "D", "conv1d", "norm", "out_proj")


class SharedMamba2(Mamba2):
    """A `Mamba2` cell whose modules and parameters are those of a Hugging Face layer.

    Nothing is copied, and nothing is kept but the layer: a weight that is changed there, replaced
    by another tensor or extended by an adapter is the weight of this cell.

    Args:
        theirs: the layer.
        family: its architecture.

    Raises:
        CannotReplaceError: the layer computes something else.
    """

    layer: Any

    def __init__(self, theirs: Any, family: Family) -> None:
        # Not the constructor of Mamba2, which would create weights.
        ScanningCell.__init__(self, theirs.hidden_size, theirs.hidden_size)
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
        self.backend = "auto"
        self.norm_eps = getattr(self.norm, "variance_epsilon", 0.0)
        self.gate = family.gate(theirs)

    def __getattr__(self, name: str) -> Any:
        if name == "norm" and not hasattr(getattr(self.layer, "norm", None), "weight"):
            return self.layer.conv1d  # any weight: the gate of a layer without a norm reads none
        if name in SHARED:
            return getattr(self.layer, name)
        if name == "in_proj":
            return self._family.projection(self.layer)
        return super().__getattr__(name)
