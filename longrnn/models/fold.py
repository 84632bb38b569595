"""Folds mitigations into weights: a change of time scales that leaves with the checkpoint."""

from collections.abc import Sequence
from operator import attrgetter

import torch
from torch import Tensor, nn

from longrnn.cells import merge
from longrnn.errors import UserError
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

    Raises:
        UserError: a parametrization computes a weight that would change.
    """
    parts, rest = _parts(model), unfoldable(model)
    folding = [pair for pair in parts if pair[0] not in rest]
    for layer, cell in enumerate(model.cells):
        chosen = [part.bind(layer, masks[layer]) for part, masks in folding if masks[layer].any()]
        weights = cell.fold(merge(chosen).to(cell.device))
        assert weights is not None
        for name, weight in weights.items():
            stored = attrgetter(name)(cell)
            if not isinstance(stored, nn.Parameter):
                raise UserError(
                    f"{name} of layer {layer} is computed by a parametrization, and what is folded "
                    "into it would be lost: call torch.nn.utils.parametrize.remove_parametrizations"
                )
            stored.copy_(weight)
    if folding:
        vars(model).update(loaded_from=None)
    return Chain(tuple(rest))


def unfoldable(model: LanguageModel) -> list[Mitigation]:
    """The parts of a model's mitigation that weights cannot express."""
    return [
        part
        for part, masks in _parts(model)
        if any(
            mask.any() and cell.fold(part.bind(layer, mask).to(cell.device)) is None
            for layer, (cell, mask) in enumerate(zip(model.cells, masks, strict=True))
        )
    ]


def _parts(model: LanguageModel) -> list[tuple[Mitigation, Sequence[Tensor]]]:
    """Each part of a model's mitigation, with the heads that it changes by layer, `(h,)` bool."""
    parts = () if model.mitigation is None else model.mitigation.parts
    return list(zip(parts, model.mitigated_heads, strict=True))
