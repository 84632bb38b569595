"""`HybridLM`: a Hugging Face model whose recurrent layers are computed by our cells.

A recurrent layer of transformers gets its cache as an argument. Given a `HybridCache` it is
computed by our cell, with the state and the edit in the cache; given anything else, or nothing, it
computes what it always did. The layer itself and the names of its weights do not change.

When a hybrid is opened, `longrnn.hf.probe` compares its logits in pieces, computed by our cells,
with those of one call without a cache, which transformers computes alone. A model with a layer that
differs from the table of `families` is therefore computed by transformers alone, as a `ForeignLM`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any, Self

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import (
    DynamicCache,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionAndSlidingWindowAttentionLayer,
)

from longrnn.cells import Cell, Edit
from longrnn.errors import UserError
from longrnn.hf.cache import LayerCache, fill_cache, keep_cache
from longrnn.hf.foreign import ForeignLM
from longrnn.hf.hybrid.families import FAMILIES
from longrnn.models.base import hash_weights
from longrnn.state import LMState, PyTree, histories

# Layers of a cache whose keys grow, and the same with a sliding window.
WINDOWED: Mapping[type, Callable[[int], Any]] = {
    DynamicLayer: DynamicSlidingWindowLayer,
    LinearAttentionAndFullAttentionLayer: LinearAttentionAndSlidingWindowAttentionLayer,
}


class HybridCache(DynamicCache):
    """A `DynamicCache` that holds the states of the cells too.

    Args:
        config: of the model.
        edits: of the cells, by their layer's number in the model.
        window: of attention, in tokens; None for no limit.

    Attributes:
        cells: the states of the cells, likewise; empty before the first token.
        rnn_state: what an xLSTM takes from its cache and gives to each layer.
    """

    def __init__(self, config: Any, edits: Mapping[int, Edit | None], window: int | None) -> None:
        super().__init__(config=config)
        if window is not None:
            self.layers = [
                WINDOWED[type(layer)](window) if type(layer) in WINDOWED else layer
                for layer in self.layers
            ]
        self.edits = edits
        self.cells: dict[int, PyTree] = {}
        self.rnn_state = [CacheEntry(self) for _ in self.layers]


class CacheEntry(tuple):
    """An entry of `HybridCache.rnn_state`: an empty tuple, because an xLSTM writes to its items.

    Attributes:
        cache: the cache that the layer is to use.
    """

    cache: HybridCache

    def __new__(cls, cache: HybridCache) -> CacheEntry:
        entry = super().__new__(cls)
        entry.cache = cache
        return entry


class HybridForward:
    """The `forward` of a recurrent layer in a hybrid: that of our cell if the cache is a hybrid's.

    A class and not a closure, so that a copy of the layer runs the copy of the cell.

    Args:
        layer: the layer of transformers.
        index: its number in the model, embeddings not counted.
        cell: our cell on its weights.
        returns_state: whether the layer returns its output and a state, which is None here.
    """

    def __init__(self, layer: Any, index: int, cell: Cell, returns_state: bool) -> None:
        self.layer, self.index, self.cell = layer, index, cell
        self.returns_state = returns_state

    def __call__(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        cache = _given_cache([*args, *kwargs.values()])
        if cache is None:
            return type(self.layer).forward(self.layer, hidden_states, *args, **kwargs)
        edit, states = cache.edits[self.index], cache.cells
        if self.index not in states:
            states[self.index] = self.cell.init_state(len(hidden_states), edit)
        # The state is replaced and never changed in place, so that no copy is needed.
        y, states[self.index] = self.cell(hidden_states, states[self.index], edit)
        return (y, None) if self.returns_state else y


def _given_cache(arguments: list[Any]) -> HybridCache | None:
    """The cache among the arguments of a layer, whose names and places differ by architecture."""
    for argument in arguments:
        if isinstance(argument, HybridCache):
            return argument
        if isinstance(argument, CacheEntry):
            return argument.cache
    return None


class HybridLM(ForeignLM):
    """A Hugging Face model with recurrent layers, for evaluation, mitigation and diagnosis.

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
    makes_cache = False

    def __init__(self, model: PreTrainedModel) -> None:
        layers = recurrent_layers(model)
        family = FAMILIES[model.config.model_type]
        # A list, because the weights are already in `model`.
        self._cells: list[Cell] = [family.cell(layer, family) for layer in layers.values()]
        self.layer_numbers = list(layers)
        for (number, layer), cell in zip(layers.items(), self._cells, strict=True):
            layer.forward = HybridForward(layer, number, cell, family.returns_state)
        super().__init__(model)

    @property
    def cells(self) -> list[Cell]:
        """The cell of each recurrent layer, on the weights of the model."""
        return self._cells

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
        other.like = tuple(layers)
        return other

    def with_attention_window(self, window: int) -> Self:
        """Return a model whose attention layers read the last `window` tokens only.

        The current token counts. A position relative to these tokens is below `window`, so that
        there is no `max_length`. The two models share their weights, and not their states.

        Raises:
            UserError: a window below 2, above the length in the configuration, or for a model
                without attention or with an implementation of attention that takes no mask.
        """
        largest = getattr(self.config, "max_position_embeddings", None) or window
        takes_masks = self.model.config._attn_implementation in ("eager", "sdpa")
        attends = any(type(layer) in WINDOWED for layer in self.open_cache((), 0).layers)
        has_attention = attends and histories(self.like)
        if not has_attention or not takes_masks or not 2 <= window <= largest:
            raise UserError(
                f"attention_window={window} is not valid for this {self.kind}: it needs attention "
                "layers without a window, the attention implementation eager or sdpa, and 2 to "
                f"{largest:,} tokens"
            )
        other = copy.copy(self)
        other.attention_window, other.max_length = window, None
        return other

    def weights_fingerprint(self) -> str:
        """See `LanguageModel`; the window of attention is part of it."""
        weights = super().weights_fingerprint()
        if self.attention_window is None:
            return weights
        return hash_weights({"model": weights, "attention_window": self.attention_window}, {})

    def open_cache(self, layers: tuple[LayerCache, ...], position: int) -> HybridCache:
        """See `ForeignLM.open_cache`."""
        edits = dict(zip(self.layer_numbers, self.edits, strict=True))
        cache = HybridCache(self.model.config, edits, self.attention_window)
        if position:
            fill_cache(cache, layers, position)
            cache.cells = {number: layers[number].cell for number in self.layer_numbers}
        return cache

    def close_cache(self, cache: Any) -> tuple[LayerCache, ...]:
        """See `ForeignLM.close_cache`."""
        layers = list(keep_cache(cache, HybridCache))
        for number, state in cache.cells.items():
            layers[number] = layers[number]._replace(conv=(), recurrent=(), cell=state)
        return tuple(layers)

    def masks(self, tokens: Tensor, position: int) -> dict[str, Any]:
        """See `ForeignLM.masks`."""
        window = self.attention_window
        if window is None:
            return {}
        stop = position + tokens.shape[1]
        steps = torch.arange(position, stop, device=tokens.device)
        keys = torch.arange(max(0, position - window + 1), stop, device=tokens.device)
        distance = steps[:, None] - keys
        hidden = (distance < 0) | (distance >= window)
        mask = torch.zeros(hidden.shape, dtype=self.model.dtype, device=tokens.device)
        mask = mask.masked_fill(hidden, torch.finfo(mask.dtype).min)[None, None]
        return {"attention_mask": {"full_attention": mask, "linear_attention": None}}


def recurrent_layers(model: PreTrainedModel) -> Mapping[int, Any]:
    """Return the recurrent layers of a hybrid by their number in the model; empty for others."""
    family = FAMILIES.get(model.config.model_type)
    name = family and family.layer
    return {
        next(int(part) for part in path.split(".") if part.isdigit()): module
        for path, module in model.named_modules()
        if type(module).__name__ == name
    }


def restore_layers(model: PreTrainedModel) -> None:
    """Make transformers compute the recurrent layers of what was a `HybridLM`."""
    for layer in recurrent_layers(model).values():
        vars(layer).pop("forward", None)
