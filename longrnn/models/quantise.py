"""Weights of a loaded model in fewer bits than its checkpoint has."""

from __future__ import annotations

from collections.abc import Callable

from longrnn.errors import UserError, nearest
from longrnn.models.base import LanguageModel
from longrnn.models.recurrent import RecurrentLM
from longrnn.ops.linear import Int8Linear, Linear


def int8_projections(model: RecurrentLM) -> None:
    """Stores the projections of all cells in int8, and makes all weights constants.

    Raises:
        UserError: a projection is not a plain linear layer.
    """
    for mixer in model.mixers:
        for name in mixer.projections:
            projection = mixer.get_submodule(name)
            if isinstance(projection, Int8Linear):
                continue
            if type(projection) is not Linear:
                raise UserError(
                    f"the projection {name} is a {type(projection).__name__}, whose weight alone "
                    "does not say what it computes: give a model without adapters or with merged "
                    "ones"
                )
            setattr(mixer, name, Int8Linear(projection))
    model.requires_grad_(False)


WEIGHTS: dict[str, Callable[[RecurrentLM], None]] = {"int8": int8_projections}


def quantise(model: LanguageModel, weights: str | None) -> None:
    """Replaces weights of a model that was just loaded.

    Args:
        model: changed in place.
        weights: one of `WEIGHTS`; None changes nothing.

    Raises:
        UserError: another word, or a model without projections that longrnn computes.
    """
    if weights is None:
        return
    if weights not in WEIGHTS:
        raise UserError(f"unknown weights {weights!r}: {nearest(weights, WEIGHTS)}")
    if not isinstance(model, RecurrentLM) or not all(one.projections for one in model.mixers):
        raise UserError(
            f"weights in {weights} are those of the projections of a Mamba-2 model that longrnn "
            "computes without transformers, and this is another model: leave out weights"
        )
    WEIGHTS[weights](model)


def is_quantised(model: RecurrentLM) -> bool:
    """Whether some weights are no longer those of a checkpoint."""
    return any(isinstance(module, Int8Linear) for module in model.modules())


def refuse_to_save(model: RecurrentLM) -> None:
    """Refuses a model whose weights a checkpoint does not store.

    Raises:
        UserError: some weights were rounded to fewer bits.
    """
    if is_quantised(model):
        raise UserError(
            "this model has weights in int8, which a checkpoint does not store: save a model that "
            'was loaded without weights="int8"'
        )
