"""Folds mitigations into weights: a change of time scales that leaves with the checkpoint."""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter

import torch
from torch import Tensor

from longrnn.cells import merge
from longrnn.mitigations import Chain, Mitigation
from longrnn.models.base import LanguageModel


@torch.no_grad()
def fold(model: LanguageModel) -> Chain:
    """Write those parts of a model's mitigation into its weights that weights can express.

    The weights of all models that share them change. The parts are applied stage by stage, so that
    those which do not fold may stand before, between and after the others.

    Args:
        model: under a mitigation, or without.

    Returns:
        The other parts: under them, the model computes what it computed before.
    """
    parts = () if model.mitigation is None else model.mitigation.parts()
    pairs = list(zip(parts, model.mitigated_heads, strict=True))
    folding = [pair for pair in pairs if folds(model, *pair)]
    for layer, cell in enumerate(model.cells):
        chosen = [part.bind(layer, masks[layer]) for part, masks in folding if masks[layer].any()]
        weights = cell.fold(merge(chosen).to(cell.device))
        assert weights is not None
        for name, weight in weights.items():
            attrgetter(name)(cell).copy_(weight)
    if folding:
        vars(model).update(loaded_from=None)
    return Chain([part for part, masks in pairs if not folds(model, part, masks)])


def folds(model: LanguageModel, part: Mitigation, masks: Sequence[Tensor]) -> bool:
    """Whether weights can express one part of a mitigation.

    Args:
        model: its cells are asked.
        part: a mitigation.
        masks: the heads that it changes by layer, `(h,)` bool.
    """
    return all(
        cell.fold(part.bind(layer, mask).to(cell.device)) is not None
        for layer, (cell, mask) in enumerate(zip(model.cells, masks, strict=True))
        if mask.any()
    )
