"""`HybridLM`: a Hugging Face model whose Mamba-2 layers are computed by our cells.

When a hybrid is loaded, `longrnn.hf.probe` compares its logits in pieces, computed by our cells,
with those of one call without a cache, which transformers computes alone. A layer that differs from
the table of `families` would therefore be found, and the model be run by transformers.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any, Self

from transformers import PreTrainedModel

from longrnn.cells import Cell
from longrnn.errors import UserError
from longrnn.hf.adapter import HFLanguageModel
from longrnn.hf.hybrid.cache import HybridCarrier, HybridForward
from longrnn.hf.hybrid.cell import SharedMamba2
from longrnn.hf.hybrid.families import FAMILIES, CannotReplaceError
from longrnn.hf.positions import longest
from longrnn.hf.sizes import quietly
from longrnn.models.base import hash_weights
from longrnn.state import LMState, PyTree, histories

logger = logging.getLogger(__name__)


class HybridLM(HFLanguageModel):
    """A Hugging Face model with Mamba-2 layers, for evaluation, mitigation and diagnosis.

    The layers are counted without the others: layer 0 of a mitigation or a diagnosis is the first
    Mamba-2 layer, whose number in the model is `layer_numbers[0]`.

    Args:
        model: a causal language model of an architecture in `FAMILIES`.

    Attributes:
        layer_numbers: the number in the model of each Mamba-2 layer.

    Raises:
        CannotReplaceError: a layer computes something that our cell does not.
        UserError: see `HFLanguageModel`.
    """

    _carrier: HybridCarrier

    def __init__(self, model: PreTrainedModel) -> None:
        layers = mamba2_layers(model)
        family = FAMILIES[model.config.model_type]
        cells = {index: SharedMamba2(layer, family) for index, layer in layers.items()}
        for index, layer in layers.items():
            layer.forward = HybridForward(layer, index, cells[index])
        super().__init__(model, carrier=HybridCarrier(model))
        self.layer_numbers = list(cells)
        # A list, because the weights are already in `model`.
        self._cells: list[Cell] = list(cells.values())

    def with_attention_window(self, window: int) -> Self:
        """Return a model whose attention layers read the last `window` tokens only.

        The current token counts. A position relative to these tokens is below `window`, so that
        there is no `max_length`. The two models share their weights, and not their states.

        Raises:
            UserError: a window below 2, above the length in the configuration, or for a model
                without attention or with an implementation of attention that takes no mask.
        """
        trained = longest(self.config)
        if not histories(self.like):
            raise UserError(f"this {self.kind} has no attention layers: leave attention_window out")
        if not isinstance(window, int) or window < 2 or (trained and window > trained):
            most = f" and at most {trained:,}, the positions of this {self.kind}" if trained else ""
            raise UserError(
                f"attention_window must be at least 2{most}, not {window!r}: give such a number"
            )
        implementation = self.model.config._attn_implementation
        if implementation not in ("eager", "sdpa"):
            raise UserError(
                f"attention_window needs masks, which {implementation} does not take: load the "
                "model with the attention implementation sdpa"
            )
        carrier = HybridCarrier(self.model, self._carrier.edits, window)
        return self._with(_carrier=carrier, max_length=None)

    @property
    def attention_window(self) -> int | None:
        """How many tokens attention reads; None for all."""
        return self._carrier.window

    def weights_fingerprint(self) -> str:
        """See `LanguageModel`; the window of attention is part of it."""
        weights = super().weights_fingerprint()
        if self.attention_window is None:
            return weights
        return hash_weights({"model": weights, "attention_window": self.attention_window}, {})

    @property
    def cells(self) -> list[Cell]:
        """The cell of each Mamba-2 layer, on the weights of the model."""
        return self._cells

    def under(self, mitigation: Any) -> Self:
        """See `LanguageModel.under`."""
        other = super().under(mitigation)
        edits = dict(zip(self.layer_numbers, other.edits, strict=True))
        other._carrier = HybridCarrier(self.model, edits, self._carrier.window)
        # What the cells of windowed layers remember has another structure.
        layers = list(self.like)
        for number, cell, edit in zip(self.layer_numbers, self.cells, other.edits, strict=True):
            layers[number] = layers[number]._replace(cell=cell.like(edit))
        other.like = tuple(layers)
        return other

    def cell_states(self, state: LMState) -> list[PyTree]:
        """Return the state of each cell."""
        return [state.layers[number].cell for number in self.layer_numbers]


def mamba2_layers(model: PreTrainedModel) -> Mapping[int, Any]:
    """Return the Mamba-2 layers of a hybrid by their number in the model; empty for others."""
    family = FAMILIES.get(model.config.model_type)
    if family is None:
        return {}
    found: list[Any] = [one for one in model.modules() if type(one).__name__ == family.layer]
    return {layer.layer_idx: layer for layer in found}


def open_hugging_face(model: PreTrainedModel) -> HFLanguageModel:
    """Return a `HybridLM` if the model has Mamba-2 layers that our cells can compute.

    Any other model becomes an `HFLanguageModel`; if it has Mamba-2 layers, a warning says why our
    cells cannot compute them.

    Raises:
        UserError: see `HFLanguageModel`.
    """
    if not mamba2_layers(model):
        return HFLanguageModel(model)
    try:
        # transformers would advise to install kernels for layers that longrnn computes.
        with quietly():
            return HybridLM(model)
    except CannotReplaceError as error:
        reason = str(error)
    except UserError as error:
        plain = HFLanguageModel(model)
        logger.warning("%s; it is run by transformers, without mitigations or diagnosis", error)
        return plain
    logger.warning(
        f"a Mamba-2 layer of this {model.config.model_type} cannot be computed by longrnn "
        f"({reason}): it is run by transformers, without mitigations or diagnosis"
    )
    return HFLanguageModel(model)
