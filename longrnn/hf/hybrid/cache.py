"""`HybridCache`: the cache that a `HybridLM` gives to the layers of a Hugging Face model."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from transformers import cache_utils

from longrnn.cells import Edit
from longrnn.hf.attention_window import WindowCall
from longrnn.hf.cache import LayerCache, UncutCache, kept_keys
from longrnn.hf.windowed import WindowedCall
from longrnn.ops.rows import Rows
from longrnn.state import PyTree


class CacheEntry:
    """An entry of `HybridCache.rnn_state`: empty, because an xLSTM writes to its items.

    Attributes:
        cache: the cache that the layer is to use.
    """

    def __init__(self, cache: "HybridCache") -> None:
        self.cache = cache

    def __len__(self) -> int:
        return 0


class HybridCache(UncutCache):
    """A cache that holds the states of the cells too, for one call.

    Args:
        config: of the model.
        edits: of the cells, by their layer's number in the model.
        rows: where documents and padding begin; None for rows of one document.
        attention: computes the attention of the call; None for transformers alone.

    Attributes:
        cells: the states of the cells, likewise; empty before the first token.
    """

    def __init__(
        self,
        config: Any,
        edits: Mapping[int, Edit | None],
        rows: Rows | None = None,
        attention: WindowedCall | None = None,
    ) -> None:
        super().__init__(config)
        self.edits, self.rows, self.attention = edits, rows, attention
        self.cells: dict[int, PyTree] = {}
        self._attends = any(isinstance(layer, cache_utils.CacheLayerMixin) for layer in self.layers)

    @property
    def rnn_state(self) -> list[CacheEntry]:
        """What an xLSTM takes from its cache and gives to each layer. Made when it is asked for: an
        entry that a cache held would keep it, and what a call computed, until a collection."""
        return [CacheEntry(self) for _ in self.layers]

    # transformers asks these of models without a layer of attention too, and does not answer them.

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """The number of keys of a layer; 0 in a model without attention."""
        return super().get_seq_length(layer_idx) if self._attends else 0

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """The number of keys of a layer with those of this call, and the place of the first one."""
        if not self._attends:
            return query_length, 0
        return super().get_mask_sizes(query_length, layer_idx)

    def layers_after(
        self, calls: Sequence[WindowCall], dtype: torch.dtype
    ) -> tuple[LayerCache, ...]:
        """Returns the layers of the state after the call.

        Args:
            calls: of each layer.
            dtype: of the keys and values, which a call under autocast computes in a narrower one.
        """
        name = "keys" if self.attention is None else "unrotated"
        return tuple(
            LayerCache(cell=self.cells.get(number, ()), **kept_keys(entry, call, name, dtype))
            for number, (entry, call) in enumerate(zip(self.layers, calls, strict=True))
        )
