"""Determines which layers and heads of a model a mitigation changes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import yaml
from torch import Tensor

from longrnn.errors import UserError
from longrnn.mitigations.base import COLLAPSING, Mitigation, is_indices, is_pairs
from longrnn.models.base import EditableModel


def select(part: Mitigation, model: EditableModel) -> list[Tensor]:
    """The heads that a mitigation changes, per layer, `(h,)` bool.

    Raises:
        UserError: layers or heads that the model does not have, or a diagnosis that cannot be used.
    """
    counts = [mixer.n_heads for mixer in model.mixers]
    heads: Any = _collapsing(part, model) if part.heads == COLLAPSING else part.heads
    every = range(len(counts))
    layers = every if part.layers is None else part.layers
    pairs: list[tuple[int, int | None]]
    if heads is None:
        pairs = [(layer, None) for layer in layers]
    elif is_indices(heads):
        pairs = [(layer, head) for layer in layers for head in heads]
    else:
        pairs = [(layer, head) for layer, head in heads]
    for layer in (*layers, *(layer for layer, _ in pairs)):
        if layer not in every:
            raise UserError(f"the model has no layer {layer}: use 0 to {len(counts) - 1}")
    masks = [torch.zeros(count, dtype=torch.bool) for count in counts]
    for layer, head in pairs:
        if head is not None and head >= counts[layer]:
            raise UserError(f"layer {layer} has no head {head}: use 0 to {counts[layer] - 1}")
        if layer in layers:
            masks[layer][slice(None) if head is None else head] = True
    return masks


def _collapsing(part: Mitigation, model: EditableModel) -> list[list[int]]:
    """The pairs [layer, head] that the diagnosis lists."""
    path = Path(str(part.diagnosis))
    if not path.is_file():
        raise UserError(
            f"no diagnosis file {path}: make one with `longrnn diagnose states CHECKPOINT`"
        )
    try:
        found = yaml.safe_load(path.read_text())
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UserError(f"{path} is not YAML: make it again") from error
    if not isinstance(found, dict) or not is_pairs(found.get(COLLAPSING)):
        raise UserError(f"{path} is not a diagnosis: give the diagnosis.yaml of diagnose states")
    if found.get("fingerprint") not in (None, model.fingerprint()):
        raise UserError(f"{path} is the diagnosis of another model: make one of this model")
    if not found[COLLAPSING]:
        raise UserError(
            f"{path} lists no collapsing head: leave the mitigation out, or give its heads"
        )
    return found[COLLAPSING]
