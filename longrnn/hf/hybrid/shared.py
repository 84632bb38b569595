"""Cells of this project on the weights of Hugging Face layers."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar, NamedTuple

from torch import Tensor

from longrnn.cells import GatedDeltaNet, Mamba2, ScanningCell
from longrnn.ops.norm import gated_rms_norm

# Takes the place of `longrnn.ops.norm.gated_rms_norm`, with its arguments; None for that function.
Gate = Callable[..., Tensor] | None


def with_groups(gate: Callable[..., Tensor], groups: int) -> Gate:
    """A gate whose norm has other groups than B and C."""

    def regrouped(*arguments: Any) -> Tensor:
        return gate(*arguments[:6], groups)

    return regrouped


def gated_norm(theirs: Any) -> Gate:
    """The gate of a layer whose norm follows it."""
    groups = theirs.intermediate_size // theirs.norm.group_size
    return None if groups == theirs.n_groups else with_groups(gated_rms_norm, groups)


def own_projection(theirs: Any, x: Tensor) -> Tensor:
    """The input projection of a layer that has a single one."""
    return theirs.in_proj(x)


class Family(NamedTuple):
    """The recurrent layers of one architecture.

    Attributes:
        layer: name of their class.
        cell: the class of our cells on their weights.
        project: computes what the cell's own `in_proj` would, from a layer and its input.
        gate: returns how a Mamba-2 layer gates its output.
    """

    layer: str
    cell: type[SharedMamba2] | type[SharedGatedDeltaNet]
    project: Callable[[Any, Tensor], Tensor] = own_projection
    gate: Callable[[Any], Gate] = gated_norm


class SharedCell(ScanningCell):
    """A cell whose modules and parameters are those of a Hugging Face layer.

    Nothing is copied, and nothing is kept but the layer: a weight that is changed there, replaced
    by another tensor or extended by an adapter is the weight of this cell.

    Args:
        theirs: the layer.
        family: its architecture.

    Attributes:
        shared: what this cell reads from the layer in every use, and its name there.
    """

    layer: Any
    recurrent_weights = ("A_log", "dt_bias")
    shared: ClassVar[dict[str, str]]

    def __init__(self, theirs: Any, family: Family) -> None:
        # Not the constructor of the cell, which would create weights.
        ScanningCell.__init__(self, theirs.hidden_size, theirs.hidden_size)
        self.layer, self._family, self.backend = theirs, family, "auto"

    def __getattr__(self, name: str) -> Any:
        if name in self.shared:
            return getattr(self.layer, self.shared[name])
        if name == "in_proj":
            return partial(self._family.project, self.layer)
        return super().__getattr__(name)


class SharedMamba2(SharedCell, Mamba2):
    """A `Mamba2` cell on the weights of a layer; see `SharedCell`."""

    shared: ClassVar = {
        name: name for name in ("A_log", "dt_bias", "D", "conv1d", "norm", "out_proj")
    }

    def __init__(self, theirs: Any, family: Family) -> None:
        super().__init__(theirs, family)
        self.n_heads, self.head_dim = theirs.num_heads, theirs.head_dim
        self.d_inner, self.d_state = theirs.intermediate_size, theirs.ssm_state_size
        self.n_groups, self.d_conv = theirs.n_groups, theirs.conv_kernel_size
        self.d_xBC = self.d_inner + 2 * self.n_groups * self.d_state
        least, largest = theirs.time_step_limit
        self.dt_limit = float(least), float(largest)
        self.norm_eps = getattr(self.norm, "variance_epsilon", 0.0)
        self.gate = family.gate(theirs)

    def __getattr__(self, name: str) -> Any:
        if name == "norm" and not hasattr(getattr(self.layer, "norm", None), "weight"):
            return self.layer.conv1d  # any weight: the gate of a layer without a norm reads none
        return super().__getattr__(name)


class SharedGatedDeltaNet(SharedCell, GatedDeltaNet):
    """A `GatedDeltaNet` cell on the weights of a layer; see `SharedCell`."""

    shared: ClassVar = {name: name for name in ("A_log", "dt_bias", "conv1d", "norm", "out_proj")}

    def __init__(self, theirs: Any, family: Family) -> None:
        super().__init__(theirs, family)
        self.n_heads, self.n_key_heads = theirs.num_v_heads, theirs.num_k_heads
        self.key_dim, self.value_dim = theirs.head_k_dim, theirs.head_v_dim
        self.d_conv = theirs.conv_kernel_size
        self.largest_beta = 2.0 if getattr(theirs, "allow_neg_eigval", False) else 1.0
        keys, values = self.n_key_heads * self.key_dim, self.n_heads * self.value_dim
        self.in_sizes = [2 * keys + values, values, self.n_heads, self.n_heads]
        self.norm_eps = self.norm.variance_epsilon


class SharedOlmoHybrid(SharedGatedDeltaNet):
    """The same for an OLMo-Hybrid, where two modules have other names."""

    shared: ClassVar = SharedGatedDeltaNet.shared | {"norm": "o_norm", "out_proj": "o_proj"}
