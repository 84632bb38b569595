"""How the Mamba-2 layer of each Hugging Face architecture maps onto the `Mamba2` cell.

The layers of all architectures have the same attributes and the same layout of `in_proj` (gate, x,
B, C, dt). The table lists what differs: the class of the layer, what surrounds the input
projection, and how the output is gated. `SharedMamba2` is the cell on the weights of such a layer.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from longrnn.cells import Mamba2, ScanningCell
from longrnn.errors import UserError
from longrnn.ops.norm import gated_rms_norm

# Takes the place of `longrnn.ops.norm.gated_rms_norm`, with its arguments; None for that function.
Gate = Callable[..., Tensor] | None


def norm_then_gate(
    y: Tensor, z: Tensor, x: Tensor, D: Tensor, weight: Tensor, eps: float, groups: int
) -> Tensor:
    """rms_norm(y + D x) · weight · silu(z), per group of channels."""
    wide = _with_skip(y, x, D)
    grouped = wide.unflatten(-1, (groups, -1))
    normed = F.rms_norm(grouped, grouped.shape[-1:], eps=eps).flatten(-2)
    return (normed * weight * F.silu(z.to(wide.dtype))).to(z.dtype)


def plain_gate(
    y: Tensor, z: Tensor, x: Tensor, D: Tensor, weight: Tensor, eps: float, groups: int
) -> Tensor:
    """(y + D x) · silu(z), without a norm."""
    wide = _with_skip(y, x, D)
    return (wide * F.silu(z.to(wide.dtype))).to(z.dtype)


def _with_skip(y: Tensor, x: Tensor, D: Tensor) -> Tensor:
    """y + D x, `(b, t, h p)` in float32 or wider."""
    dtype = torch.promote_types(y.dtype, torch.float32)
    return torch.addcmul(y.to(dtype), x.to(dtype), D.to(dtype)[:, None]).flatten(2)


class ScaledProjection(nn.Module):
    """The input projection of a Falcon-H1: its input and every output are multiplied by constants.

    Args:
        theirs: the layer that has the projection and the constants.
    """

    layer: Any

    def __init__(self, theirs: Any) -> None:
        super().__init__()
        self.layer = theirs

    @property
    def weight(self) -> Tensor:
        """The weight of the projection, without the constants."""
        return self.layer.in_proj.weight

    def forward(self, x: Tensor) -> Tensor:
        # `mup_vector` is read from the layer, because moving a module replaces its buffers.
        return self.layer.in_proj(x * self.layer.ssm_in_multiplier) * self.layer.mup_vector


def _own_projection(theirs: Any) -> nn.Module:
    return theirs.in_proj


def _with_groups(gate: Callable[..., Tensor], groups: int) -> Gate:
    """A gate whose norm has other groups than B and C."""

    def regrouped(*arguments: Any) -> Tensor:
        return gate(*arguments[:6], groups)

    return regrouped


def _gated_norm(theirs: Any) -> Gate:
    groups = theirs.intermediate_size // theirs.norm.group_size
    return None if groups == theirs.n_groups else _with_groups(gated_rms_norm, groups)


def _falcon_gate(theirs: Any) -> Gate:
    if not theirs.mamba_rms_norm:
        return plain_gate
    if theirs.norm.norm_before_gate:
        return _with_groups(norm_then_gate, theirs.norm.n_groups)
    same = theirs.norm.n_groups == theirs.n_groups
    return None if same else _with_groups(gated_rms_norm, theirs.norm.n_groups)


class Family(NamedTuple):
    """One architecture.

    Attributes:
        layer: name of the class of its Mamba-2 layers.
        gate: returns how a layer gates its output, with the arguments of `Backend.gate`.
        projection: returns the input projection of a layer.
    """

    layer: str
    gate: Callable[[Any], Gate] = _gated_norm
    projection: Callable[[Any], nn.Module] = _own_projection


# By the `model_type` of a configuration.
FAMILIES: dict[str, Family] = {
    "bamba": Family("BambaMixer"),
    "falcon_h1": Family("FalconH1Mixer", _falcon_gate, ScaledProjection),
    "granitemoehybrid": Family("GraniteMoeHybridMambaLayer"),
    "nemotron_h": Family("NemotronHMamba2Mixer"),
    "zamba2": Family("Zamba2MambaMixer"),
}


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
        UserError: the layer computes something else.
    """

    layer: Any

    def __init__(self, theirs: Any, family: Family) -> None:
        # Not the constructor of Mamba2, which would create weights.
        ScanningCell.__init__(self, theirs.hidden_size, theirs.hidden_size)
        self.layer, self._family = theirs, family
        if theirs.activation not in ("silu", "swish"):
            raise UserError(f"its convolution has the activation {theirs.activation}")
        if hasattr(theirs, "_hf_hook"):
            raise UserError("its weights are moved between devices by accelerate")
        for name in ("in_proj", "out_proj"):
            if not getattr(theirs, name).weight.is_floating_point():
                raise UserError(f"the weights of its {name} are quantised")
        self.n_heads, self.head_dim = theirs.num_heads, theirs.head_dim
        self.d_inner, self.d_state = theirs.intermediate_size, theirs.ssm_state_size
        self.n_groups, self.d_conv = theirs.n_groups, theirs.conv_kernel_size
        if self.d_inner != self.n_heads * self.head_dim:
            raise UserError(
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


@contextmanager
def wide_weights(kind: str | None) -> Iterator[None]:
    """Makes transformers load the weights of recurrences in float32, the rest in any dtype.

    In a narrower dtype the slow decays of a float32 checkpoint would be rounded away.

    Args:
        kind: the model type; for one without a family nothing changes.
    """
    if kind not in FAMILIES:
        yield
        return
    import transformers
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    cls = getattr(transformers, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[kind])
    name = "_keep_in_fp32_modules_strict"
    before = getattr(cls, name)
    setattr(cls, name, [*(before or ()), *Mamba2.wide_weights])
    try:
        yield
    finally:
        setattr(cls, name, before)


@contextmanager
def quietly() -> Iterator[None]:
    """A context for calls of transformers whose reports the caller checks: without its messages.

    Without a GPU, transformers would call kernels of flash-linear-attention on the CPU, where they
    cannot run: the package is hidden while transformers imports a model's code.
    """
    from transformers.utils import logging

    bars, level = logging.is_progress_bar_enabled(), logging.get_verbosity()
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    hidden, before = not torch.cuda.is_available(), sys.modules.get("fla")
    if hidden:
        sys.modules["fla"] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()
        if hidden:
            del sys.modules["fla"]
            if before is not None:
                sys.modules["fla"] = before
