"""`HybridCache`: the cache that a `HybridLM` gives to the layers of a Hugging Face model."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import cache_utils

from longrnn.cells import Edit
from longrnn.hf.attention_window import AttentionWindow, added_mask
from longrnn.hf.cache import LayerCache, UncutCache, kept_keys
from longrnn.hf.windowed import WindowedCall, masked_implementation
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
        self, windows: Sequence[AttentionWindow], position: int, dtype: torch.dtype
    ) -> tuple[LayerCache, ...]:
        """Returns the layers of the state after the call.

        Args:
            windows: of the attention of each layer.
            position: how many tokens were read in the row that has read the most.
            dtype: of the keys and values, which a call under autocast computes in a narrower one.
        """
        name, layers = "keys" if self.attention is None else "unrotated", []
        for number, entry in enumerate(self.layers):
            keep = partial(self._kept, number, windows[number].kept(position), dtype)
            cell = self.cells.get(number, ())
            layers.append(LayerCache(cell=cell, **kept_keys(entry, keep, name)))
        return tuple(layers)

    def _kept(self, number: int, count: int, dtype: torch.dtype, entries: Tensor) -> Tensor:
        """The entries `(b, h, t, d)` of a layer that the state holds, `count` of each row."""
        if self.attention is not None:
            kept = self.attention.calls[number].keep(entries)
        elif self.rows is not None and self.rows.has_padding:
            kept = self.rows.last(entries.transpose(1, 2), count).transpose(1, 2)
        else:
            kept = entries[..., entries.shape[-2] - count :, :]
        return kept.to(dtype)


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
    implementation = masked_implementation(model)
    masks: dict[str, Tensor | None] = {"linear_attention": None}
    # How many earlier tokens of its document each token reads.
    reach = positions[:1, :, None] if is_even else positions[..., None]
    for name, window in windows.items():
        stored = AttentionWindow(window).kept(known)
        keys = torch.arange(stored + time, device=positions.device)
        distance = keys[stored:, None] - keys
        limit = reach if window is None else reach.clamp(max=window - 1)
        mask = ((distance >= 0) & (distance <= limit))[:, None]
        masks[name] = added_mask(mask, model.dtype) if implementation == "eager" else mask
    return {"attention_mask": masks}
