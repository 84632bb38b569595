"""How the Mamba-2 layer of each Hugging Face architecture maps onto the `Mamba2` mixer.

The layers of all architectures have the same attributes and the same layout of `in_proj` (gate, x,
B, C, dt). The table lists what differs: the class of the layer, what surrounds the input
projection, and how the output is gated.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from longrnn.mixers import Mamba2
from longrnn.ops.norm import gated_rms_norm


class CannotReplaceError(Exception):
    """A Mamba-2 layer computes something that the `Mamba2` mixer cannot; the message says what."""


class Gate(ABC):
    """How y is gated by z, both `(b, t, d_inner)`.

    Attributes:
        fused: whether the C++ kernel of the mixer computes the same.
    """

    fused = False

    @abstractmethod
    def __call__(self, y: Tensor, z: Tensor) -> Tensor:
        """Return the gated y in the dtype of z."""


class GatedNorm(Gate):
    """rms_norm(y · silu(z)) · weight, for each group of channels.

    Args:
        layer: has the norm, which is read in every call because another may take its place.
        groups: of channels.
    """

    fused = True

    def __init__(self, layer: Any, groups: int) -> None:
        self.layer, self.groups = layer, groups

    def __call__(self, y: Tensor, z: Tensor) -> Tensor:
        norm = self.layer.norm
        return gated_rms_norm(y, z, norm.weight, norm.variance_epsilon, self.groups)


class NormThenGate(GatedNorm):
    """rms_norm(y) · weight · silu(z), for each group of channels."""

    fused = False

    def __call__(self, y: Tensor, z: Tensor) -> Tensor:
        wide = y.to(torch.promote_types(y.dtype, torch.float32))
        grouped = wide.unflatten(-1, (self.groups, -1))
        norm = self.layer.norm
        normed = F.rms_norm(grouped, grouped.shape[-1:], eps=norm.variance_epsilon)
        return (normed.flatten(-2) * norm.weight * F.silu(z.to(wide.dtype))).to(z.dtype)


class PlainGate(Gate):
    """y · silu(z), without a norm."""

    def __call__(self, y: Tensor, z: Tensor) -> Tensor:
        wide = y.to(torch.promote_types(y.dtype, torch.float32))
        return (wide * F.silu(z.to(wide.dtype))).to(z.dtype)


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


def _gated_norm(theirs: Any) -> Gate:
    return GatedNorm(theirs, theirs.intermediate_size // theirs.norm.group_size)


def _falcon_gate(theirs: Any) -> Gate:
    if not theirs.mamba_rms_norm:
        return PlainGate()
    kind = NormThenGate if theirs.norm.norm_before_gate else GatedNorm
    return kind(theirs, theirs.norm.n_groups)


class Family(NamedTuple):
    """One architecture.

    Attributes:
        layer: name of the class of its Mamba-2 layers.
        gate: returns how a layer gates its output.
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
