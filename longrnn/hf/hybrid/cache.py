"""`HybridCache`: the cache that a `HybridLM` gives to the layers of a Hugging Face model."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, cache_utils

from longrnn.cells import Edit
from longrnn.errors import UserError
from longrnn.hf.cache import LayerCache, kept_keys, released, restore_keys
from longrnn.ops.rows import BEFORE, Rows
from longrnn.state import History, PyTree

# Layers of a cache that drop keys, and the same without a window: `HybridCache.layers_after` drops.
WITHOUT_WINDOW: Mapping[type, Callable[[], Any]] = {
    cache_utils.DynamicSlidingWindowLayer: cache_utils.DynamicLayer,
    cache_utils.LinearAttentionAndSlidingWindowAttentionLayer: (
        cache_utils.LinearAttentionAndFullAttentionLayer
    ),
}

# Implementations of attention in transformers that take a mask for each row.
MASKED = ("sdpa", "eager")


class HybridCache(DynamicCache):
    """A `DynamicCache` that holds the states of the cells too, for one call.

    Args:
        config: of the model.
        edits: of the cells, by their layer's number in the model.
        rows: where documents and padding begin; None for rows of one document.

    Attributes:
        cells: the states of the cells, likewise; empty before the first token.
        rnn_state: what an xLSTM takes from its cache and gives to each layer.
    """

    def __init__(
        self, config: Any, edits: Mapping[int, Edit | None], rows: Rows | None = None
    ) -> None:
        super().__init__(config=config)
        self.layers = [
            WITHOUT_WINDOW[type(layer)]() if type(layer) in WITHOUT_WINDOW else layer
            for layer in self.layers
        ]
        self.edits, self.rows = edits, rows
        self.cells: dict[int, PyTree] = {}
        self.rnn_state = [CacheEntry(self) for _ in self.layers]
        self._attends = any(isinstance(layer, cache_utils.CacheLayerMixin) for layer in self.layers)

    # transformers asks these of models without a layer of attention too, and does not answer them.

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """The number of keys of a layer; 0 in a model without attention."""
        return super().get_seq_length(layer_idx) if self._attends else 0

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """The number of keys of a layer with those of this call, and the place of the first one."""
        if not self._attends:
            return query_length, 0
        return super().get_mask_sizes(query_length, layer_idx)

    def fill(
        self, layers: Iterable[LayerCache], windows: Sequence[int | None], position: int
    ) -> None:
        """Writes the layers of a state into an empty cache.

        Args:
            layers: of the state.
            windows: of the attention of each layer; None for none.
            position: how many tokens were read in the row that has read the most.

        Raises:
            UserError: the layers are of a model with another window of attention.
        """
        for number, layer in enumerate(layers):
            if number in self.edits:
                self.cells[number] = layer.cell
            needed, most = (kept_keys(windows[number], read) for read in (position, BEFORE))
            restore_keys(self.layers[number], layer, position, needed, most)

    def layers_after(
        self, windows: Sequence[int | None], position: int, like: Sequence[LayerCache]
    ) -> tuple[LayerCache, ...]:
        """Returns the layers of the state after the call.

        Args:
            windows: see `fill`.
            position: likewise, after the call.
            like: layers whose keys have the dtype of those of a state, because keys that were
                computed under autocast may be narrower; empty for that of the call.
        """
        layers = []
        for number, entry in enumerate(self.layers):
            keys: Any = ()
            values: Any = ()
            if getattr(entry, "keys", None) is not None:
                known: Any = like[number].keys if like else ()
                dtype = known.entries.dtype if known else entry.keys.dtype
                keys, values = (
                    History(
                        released(
                            self._last(entries, kept_keys(windows[number], position)).to(dtype)
                        )
                    )
                    for entries in (entry.keys, entry.values)
                )
            layers.append(LayerCache(keys, values, cell=self.cells.get(number, ())))
        return tuple(layers)

    def _last(self, entries: Tensor, count: int) -> Tensor:
        """The last `count` entries `(b, h, t, d)` of each row, without padding."""
        if self.rows is not None and self.rows.has_padding:
            return self.rows.last(entries.transpose(1, 2), count).transpose(1, 2)
        return entries[..., entries.shape[-2] - count :, :]


class CacheEntry:
    """An entry of `HybridCache.rnn_state`: empty, because an xLSTM writes to its items.

    Attributes:
        cache: the cache that the layer is to use.
    """

    def __init__(self, cache: HybridCache) -> None:
        self.cache = cache

    def __len__(self) -> int:
        return 0


def attention_masks(
    model: Any,
    windows: Mapping[str, int | None],
    positions: Tensor,
    before: Sequence[int],
    rows: Rows | None,
) -> dict[str, Any]:
    """Returns the masks of a call by argument; none where transformers makes the same.

    Args:
        model: of transformers.
        windows: by the name of a kind of attention; None for none.
        positions: `(b, t)`, of each token in its document.
        before: the position of each row before the call.
        rows: where documents and padding begin.

    Raises:
        UserError: the model's implementation of attention takes no masks.
    """
    known, time = max(before), positions.shape[1]
    is_even = rows is None and min(before) == known
    if is_even and all(w is None or known + time <= w for w in windows.values()):
        return {}
    implementation = model.config._attn_implementation
    if implementation not in MASKED:
        raise UserError(
            f"the attention implementation {implementation} takes no masks, which windows, "
            f"padding and rows of different lengths need: load the model with {MASKED[0]}"
        )
    masks: dict[str, Tensor | None] = {"linear_attention": None}
    for name, window in windows.items():
        reach = positions[:1] if is_even else positions
        reach = reach if window is None else reach.clamp(max=window - 1)
        mask = attention_mask(reach, kept_keys(window, known))
        if implementation == "eager":  # which adds it
            least = torch.finfo(model.dtype).min
            mask = torch.zeros_like(mask, dtype=model.dtype).masked_fill(~mask, least)
        masks[name] = mask
    return {"attention_mask": masks}


def attention_mask(reach: Tensor, before: int) -> Tensor:
    """Returns which keys each token reads, `(b, 1, t, before + t)` bool.

    Args:
        reach: `(b, t)`, how many earlier tokens of its document and window each token reads.
        before: number of keys of earlier calls, the last ones of each row.
    """
    time = reach.shape[1]
    keys = torch.arange(before + time, device=reach.device)
    distance = keys[before:, None] - keys
    return ((distance >= 0) & (distance <= reach[..., None]))[:, None]
