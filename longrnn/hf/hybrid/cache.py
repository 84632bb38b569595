"""The cache of a hybrid: that of transformers for attention, and the states of our cells.

Notable choices:
- A Mamba-2 layer of transformers gets its cache as an argument. Given a `HybridCache` it is
  computed by our cell, with the state and the edit in the cache; given anything else, or nothing,
  it computes what it always did. The layer itself and the names of its weights do not change.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

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
from longrnn.hf.cache import LayerCache, NotForkableError, fill_cache, keep_cache
from longrnn.hf.carriers import Carrier
from longrnn.state import PyTree


class HybridLayer(NamedTuple):
    """The state of one layer of a hybrid.

    Attributes:
        attention: what transformers keeps for the layer.
        cell: the state of its Mamba-2 cell; () for a layer without one.
    """

    attention: LayerCache
    cell: PyTree = ()


# Layers of a cache whose keys grow, and the same with a sliding window.
WINDOWED: Mapping[type, Callable[[int], Any]] = {
    DynamicLayer: DynamicSlidingWindowLayer,
    LinearAttentionAndFullAttentionLayer: LinearAttentionAndSlidingWindowAttentionLayer,
}


class HybridCache(DynamicCache):
    """A `DynamicCache` that holds the states of the Mamba-2 cells too.

    Args:
        config: of the model.
        edits: by layer.
        window: of attention, in tokens; None for no limit.

    Attributes:
        cells: the states, by layer; empty before the first token.
    """

    def __init__(
        self, config: Any, edits: Mapping[int, Edit | None], window: int | None = None
    ) -> None:
        super().__init__(config=config)
        if window is not None:
            self.layers = [
                WINDOWED[type(layer)](window) if type(layer) in WINDOWED else layer
                for layer in self.layers
            ]
        self.edits = edits
        self.cells: dict[int, PyTree] = {}

    def run(self, index: int, cell: Cell, x: Tensor) -> Tensor:
        """Return the output of a layer's cell, and replace its state by that after the tokens."""
        edit, state = self.edits.get(index), self.cells.get(index)
        state = cell.init_state(len(x), edit) if state is None else state
        y, self.cells[index] = cell(x, state, edit)
        return y


class HybridForward:
    """The `forward` of a Mamba-2 layer in a hybrid: that of our cell if the cache is a hybrid's.

    A class and not a closure, so that a copy of the layer runs the copy of the cell.

    Args:
        layer: the layer of transformers.
        index: its number in the model, embeddings not counted.
        cell: our cell on its weights.
    """

    def __init__(self, layer: Any, index: int, cell: Cell) -> None:
        self.layer, self.index, self.cell = layer, index, cell

    def __call__(
        self, hidden_states: Tensor, cache_params: Any = None, *args: Any, **kwargs: Any
    ) -> Tensor:
        if isinstance(cache_params, HybridCache):
            return cache_params.run(self.index, self.cell, hidden_states)
        theirs = type(self.layer).forward
        return theirs(self.layer, hidden_states, cache_params, *args, **kwargs)


class HybridCarrier(Carrier):
    """Converts a `HybridCache` to layers of type `HybridLayer`, and back.

    Args:
        model: the model.
        edits: of the cells, by layer.
        window: how many tokens attention reads, the current one included; None for all.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        edits: Mapping[int, Edit | None] | None = None,
        window: int | None = None,
    ) -> None:
        super().__init__(model, "past_key_values")
        self.edits, self.window = edits or {}, window

    def start(self) -> HybridCache:
        return HybridCache(self.config, self.edits, self.window)

    def arguments(self, tokens: Tensor, position: int) -> dict[str, Any]:
        if self.window is None:
            return {}
        steps = torch.arange(position, position + tokens.shape[1], device=tokens.device)
        first = max(0, position - self.window + 1)
        keys = torch.arange(first, position + tokens.shape[1], device=tokens.device)
        distance = steps[:, None] - keys
        hidden = (distance < 0) | (distance >= self.window)
        mask = torch.zeros(hidden.shape, dtype=self.model.dtype, device=tokens.device)
        mask = mask.masked_fill(hidden, torch.finfo(mask.dtype).min)[None, None]
        masks = {"full_attention": mask, "linear_attention": None}
        return {"attention_mask": masks, "position_ids": steps.expand(len(tokens), -1)}

    def restore(self, layers: tuple[HybridLayer, ...], position: int) -> HybridCache:
        cache = self.start()
        fill_cache(cache, tuple(layer.attention for layer in layers), position)
        # Our cells replace these states and never change them in place: no copy is needed.
        cache.cells = {i: layer.cell for i, layer in enumerate(layers) if layer.cell != ()}
        return cache

    def keep(self, cache: Any) -> tuple[HybridLayer, ...]:
        if not isinstance(cache, HybridCache):
            raise NotForkableError(f"its cache is a {type(cache).__name__}")
        cells = cache.cells
        return tuple(
            HybridLayer(layer._replace(conv=(), recurrent=()), cells[index])
            if index in cells
            else HybridLayer(layer)
            for index, layer in enumerate(keep_cache(cache))
        )
