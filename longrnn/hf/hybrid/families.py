"""How the recurrent layers of each Hugging Face architecture map onto cells of this project.

Layers that map onto the same cell have the same attributes. The table lists what differs: the class
of the layer, what surrounds its input projections, and how a Mamba-2 layer gates its output.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.nn import functional as F

from longrnn.hf.hybrid.shared import (
    Family,
    Gate,
    SharedGatedDeltaNet,
    SharedMamba2,
    SharedOlmoHybrid,
    with_groups,
)
from longrnn.ops.norm import gated_rms_norm


def plain_gate(
    y: Tensor, z: Tensor, x: Tensor, D: Tensor, weight: Tensor, eps: float, groups: int
) -> Tensor:
    """(y + D x) · silu(z), without a norm."""
    dtype = torch.promote_types(y.dtype, torch.float32)
    wide = torch.addcmul(y.to(dtype), x.to(dtype), D.to(dtype)[:, None]).flatten(2)
    return (wide * F.silu(z.to(dtype))).to(z.dtype)


def _falcon_gate(theirs: Any) -> Gate:
    if not theirs.mamba_rms_norm:
        return plain_gate
    same = theirs.norm.n_groups == theirs.n_groups
    return None if same else with_groups(gated_rms_norm, theirs.norm.n_groups)


def _scaled(theirs: Any, x: Tensor) -> Tensor:
    """The projection of a Falcon-H1: its input and every output are multiplied by constants."""
    return theirs.in_proj(x * theirs.ssm_in_multiplier) * theirs.mup_vector


def _by_key_head(theirs: Any, x: Tensor) -> Tensor:
    """The projections of a Qwen3-Next, whose outputs are grouped by key head."""
    grouped = theirs.in_proj_qkvz(x), theirs.in_proj_ba(x)
    parts = theirs.fix_query_key_value_ordering(*grouped)
    return torch.cat([part.flatten(2) for part in parts], dim=-1)


def _joined(*names: str) -> Callable[[Any, Tensor], Tensor]:
    """The outputs of several projections side by side."""

    def project(theirs: Any, x: Tensor) -> Tensor:
        return torch.cat([getattr(theirs, name)(x) for name in names], dim=-1)

    return project


_OLMO = _joined("q_proj", "k_proj", "v_proj", "g_proj", "b_proj", "a_proj")
_QWEN3_5 = _joined("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a")

# By the `model_type` of a configuration.
FAMILIES: dict[str, Family] = {
    "bamba": Family("BambaMixer", SharedMamba2),
    "falcon_h1": Family("FalconH1Mixer", SharedMamba2, _scaled, _falcon_gate),
    "granitemoehybrid": Family("GraniteMoeHybridMambaLayer", SharedMamba2),
    "nemotron_h": Family("NemotronHMamba2Mixer", SharedMamba2),
    "olmo_hybrid": Family("OlmoHybridGatedDeltaNet", SharedOlmoHybrid, _OLMO),
    "qwen3_5_moe_text": Family("Qwen3_5MoeGatedDeltaNet", SharedGatedDeltaNet, _QWEN3_5),
    "qwen3_5_text": Family("Qwen3_5GatedDeltaNet", SharedGatedDeltaNet, _QWEN3_5),
    "qwen3_next": Family("Qwen3NextGatedDeltaNet", SharedGatedDeltaNet, _by_key_head),
    "zamba2": Family("Zamba2MambaMixer", SharedMamba2),
}


@contextmanager
def wide_weights(kind: str) -> Iterator[None]:
    """Makes transformers load the weights of recurrences in float32, the rest in any dtype.

    In a narrower dtype the slow decays of a float32 checkpoint would be rounded away.

    Args:
        kind: the model type; for one without a family nothing changes.
    """
    # A model of images and text is loaded without its images.
    family = FAMILIES.get(kind, FAMILIES.get(f"{kind}_text"))
    if family is None:
        yield
        return
    import transformers
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    cls = getattr(transformers, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[kind])
    name = "_keep_in_fp32_modules_strict"
    kept = [*(getattr(cls, name) or ()), *family.cell.wide_weights]
    with patch.object(cls, name, kept):
        yield


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
