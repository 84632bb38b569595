"""`HybridLM`: a Hugging Face model whose recurrent layers are computed by our cells.

A recurrent layer of transformers gets its cache as an argument. Given a `HybridCache` it is
computed by our cell, with the state and the edit in the cache; given anything else, or nothing, it
computes what it always did. The layer itself and the names of its weights do not change.

When a hybrid is opened, `longrnn.hf.probe` compares its logits in pieces, computed by our cells,
with those of one call without a cache, which transformers computes alone. A model with a layer that
differs from the table of `families` is therefore computed by transformers alone, as a `ForeignLM`.

Notable choices:
- Attention reads the keys of the state by a mask: how many tokens before it a token reads follows
  from its position in its document and the window. So rows that have read different numbers of
  tokens, padded rows and packed documents go through the model in one call.
- A call with gradients goes through the model as a whole, any other call in pieces.
"""

from __future__ import annotations

import copy
from typing import Any, Self

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from longrnn.cells import Cell
from longrnn.errors import UserError
from longrnn.hf.foreign import PIECE_TOKENS, ForeignLM
from longrnn.hf.hybrid.cache import HybridCache, attention_masks
from longrnn.hf.hybrid.families import FAMILIES
from longrnn.hf.hybrid.layers import (
    HybridForward,
    RecomputedForward,
    recurrent_layers,
    whole_layers,
)
from longrnn.mitigations.spec import ATTENTION_WINDOW
from longrnn.models.base import hash_weights, refuse_long
from longrnn.models.trainable import TrainableLM
from longrnn.ops.rows import Rows, positions_of
from longrnn.state import LMState, PyTree, histories


class HybridLM(TrainableLM, ForeignLM):  # pyright: ignore
    """A Hugging Face model with recurrent layers, for training, evaluation and diagnosis.

    The layers are counted without the others: layer 0 of a mitigation or a diagnosis is the first
    recurrent layer, whose number in the model is `layer_numbers[0]`.

    Args:
        model: a causal language model of an architecture in `FAMILIES`.

    Attributes:
        layer_numbers: the number in the model of each recurrent layer.
        attention_window: how many tokens attention reads; None for all.

    Raises:
        UserError: see `ForeignLM`.
        UnsupportedLayerError: an option of its recurrent layers that the cells do not have.
    """

    attention_window: int | None = None
    _attends = False

    def __init__(self, model: PreTrainedModel) -> None:
        layers = recurrent_layers(model)
        family = FAMILIES[model.config.model_type]
        # A list, because the weights are already in `model`.
        self._cells: list[Cell] = [family.cell(layer, family) for layer in layers.values()]
        self.layer_numbers = list(layers)
        for (number, layer), cell in zip(layers.items(), self._cells, strict=True):
            layer.forward = HybridForward(layer, number, cell, family.returns_state)
        entries = DynamicCache(config=model.config).layers
        # The window that the architecture gives each layer of attention, and all of them.
        self._sliding = [getattr(entry, "sliding_window", None) for entry in entries]
        self._family_window = family.window and getattr(model.config, family.window)
        self._logit_scale = family.logit_scale(model.config)
        self.soft_cap = None if family.soft_cap is None else getattr(model.config, family.soft_cap)
        super().__init__(model)
        self._attends = bool(histories(self.like))

    @property
    def cells(self) -> list[Cell]:
        """The cell of each recurrent layer, on the weights of the model."""
        return self._cells

    @property
    def head(self) -> Any:  # pyright: ignore
        """See `TrainableLM`."""
        return self.model.get_output_embeddings()

    @property
    def blocks(self) -> list[Any]:  # pyright: ignore
        """See `TrainableLM`."""
        return whole_layers(self.model)

    def gradient_checkpointing_enable(self, enabled: bool = True) -> None:
        """See `TrainableLM`."""
        for index, block in enumerate(self.blocks):
            vars(block).pop("forward", None)
            if enabled:
                block.forward = RecomputedForward(block, index)

    def in_float64(self) -> Self:
        """See `TrainableLM`; the copy has no mitigation."""
        other = type(self)(copy.deepcopy(self.model).double())
        other.attention_window, other.max_length = self.attention_window, self.max_length
        return other

    def cell_states(self, state: LMState) -> list[PyTree]:
        """Return the state of each cell."""
        return [state.layers[number].cell for number in self.layer_numbers]

    def under(self, mitigation: Any) -> Self:
        """See `LanguageModel.under`."""
        other = super().under(mitigation)
        layers = list(self.like)
        for number, cell, edit in zip(self.layer_numbers, self.cells, other.edits, strict=True):
            # A window has a state of its own.
            layers[number] = layers[number]._replace(cell=cell.like(edit))
        other._like = self._like[0], tuple(layers)
        return other

    def with_attention_window(self, window: int) -> Self:
        """Return a model whose attention layers read the last `window` tokens only.

        The current token counts. A position relative to these tokens is below `window`, so that
        there is no `max_length`. The two models share their weights, and not their states.

        Raises:
            UserError: a window below 2, above the length in the configuration, or for a model
                without attention.
        """
        largest = getattr(self.config, "max_position_embeddings", None) or window
        if not self.attends_to_all or not 2 <= window <= largest:
            raise UserError(
                f"attention_window={window} is not valid for this {self.kind}: it needs attention "
                f"layers without a window, and 2 to {largest:,} tokens"
            )
        other = copy.copy(self)
        other.attention_window, other.max_length = window, None
        return other

    @property
    def attends_to_all(self) -> bool:
        """Whether the architecture has attention layers without a window."""
        pairs = zip(self._sliding, self.like, strict=True)
        return any(window is None and layer.keys != () for window, layer in pairs)

    @property
    def spec(self) -> str | None:
        """See `TrainableLM`; with the window of attention."""
        window = self.attention_window
        parts = [super().spec, None if window is None else f"{ATTENTION_WINDOW}(window={window})"]
        return "+".join(filter(None, reversed(parts))) or None

    def weights_fingerprint(self) -> str:
        """See `LanguageModel`; the window of attention is part of it."""
        weights = super().weights_fingerprint()
        if self.attention_window is None:
            return weights
        return hash_weights({"model": weights, "attention_window": self.attention_window}, {})

    def segment_width(self, batch_size: int, time: int) -> int:
        """See `TrainableLM`: a call with gradients goes through the model as a whole."""
        return max(1, time) if torch.is_grad_enabled() else max(16, PIECE_TOKENS // batch_size)

    def call(
        self, tokens: Tensor, layers: PyTree, position: int, keep: int
    ) -> tuple[Tensor, tuple[PyTree, ...]]:
        """See `ForeignLM.call`."""
        before = torch.full((len(tokens),), position, device=tokens.device)
        hidden, after = self.segment(tokens, LMState(before, layers), None, None)
        return self.logits(hidden), after.layers

    def segment(
        self, tokens: Tensor, state: LMState, rows: Rows | None, observe: list[Tensor] | None
    ) -> tuple[Tensor, LMState]:
        """See `TrainableLM`: one call of the model.

        Raises:
            UserError: more tokens than `max_length`.
        """
        positions, after = positions_of(state.position, tokens.shape[1], rows)
        refuse_long(self, int(positions.max()) + 1)
        before = state.position.tolist()
        edits = dict(zip(self.layer_numbers, self.edits, strict=True))
        cache = HybridCache(self.model.config, edits, rows)
        cache.fill(state.layers, self._windows, max(before))
        given: dict[str, Any] = {str(self._cache_name): cache, "use_cache": False}
        if "position_ids" in self._accepted:  # which some models count wrong themselves
            given["position_ids"] = positions
        given["inputs_embeds" if tokens.is_floating_point() else "input_ids"] = tokens
        if observe is not None:
            given["output_hidden_states"] = True
        if self._attends:
            sliding = next(filter(None, self._sliding), None)
            windows = {"full_attention": self._full_window, "sliding_attention": sliding}
            given |= attention_masks(self.model, windows, positions, before, rows)
        output = self.model.base_model(**given)
        if observe is not None:
            # The last entry is what libraries multiply, without the factor of the logits.
            observe += output.hidden_states
        layers = cache.layers_after(self._windows, int(after.max()), self.like)
        return output[0] * self._logit_scale, LMState(after, layers)

    @property
    def _windows(self) -> list[int | None]:
        """The window of attention of each layer; None for none."""
        return [window or self._full_window for window in self._sliding]

    @property
    def _full_window(self) -> int | None:
        """The window of the layers that the architecture calls full attention."""
        given = [self.attention_window, self._family_window]
        return min(filter(None, given), default=None)
