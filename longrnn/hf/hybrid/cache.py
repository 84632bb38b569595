"""`HybridCache`: the cache that a `HybridLM` gives to the layers of a Hugging Face model."""

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import cache_utils

from longrnn.cells import Edit
from longrnn.hf.attention_window import AttentionWindow, added_mask
from longrnn.hf.cache import LayerCache, UncutCache, kept_of_window, restore_keys
from longrnn.hf.windowed import WindowedCall, masked_implementation
from longrnn.ops.rows import Rows
from longrnn.state import PyTree


class HybridCache(UncutCache):
    """A cache that holds the states of the cells too, for one call.

    Args:
        config: of the model.
        edits: of the cells, by their layer's number in the model.
        rows: where documents and padding begin; None for rows of one document.
        attention: computes the attention of the call; None for transformers alone.

    Attributes:
        cells: the states of the cells, likewise; empty before the first token.
        rnn_state: what an xLSTM takes from its cache and gives to each layer.
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
        self, layers: Iterable[LayerCache], windows: Sequence[AttentionWindow], position: int
    ) -> None:
        """Writes the layers of a state into an empty cache.

        Args:
            layers: of the state.
            windows: of the attention of each layer.
            position: how many tokens were read in the row that has read the most.

        Raises:
            UserError: the layers are of a model with another window of attention.
        """
        for number, layer in enumerate(layers):
            if number in self.edits:
                self.cells[number] = layer.cell
            window = windows[number]
            restore_keys(self.layers[number], layer, position, window.kept(position), window.reach)

    def layers_after(
        self, windows: Sequence[AttentionWindow], position: int, like: Sequence[LayerCache]
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
            known = (like[number].keys or like[number].unrotated) if like else ()
            dtype = known.entries.dtype if known else None
            keep = partial(self._kept, number, windows[number].kept(position), dtype)
            fields = kept_of_window(entry, keep)
            if fields and self.attention is None:
                fields |= {"keys": fields["unrotated"], "unrotated": ()}
            layers.append(LayerCache(cell=self.cells.get(number, ()), **fields))
        return tuple(layers)

    def _kept(self, number: int, count: int, dtype: torch.dtype | None, entries: Tensor) -> Tensor:
        """The entries of a layer that the state holds, `count` of them."""
        if self.attention is None:
            kept = self._last(entries, count)
        else:
            kept = self.attention.calls[number].keep(entries)
        return kept if dtype is None else kept.to(dtype)

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
    implementation = masked_implementation(model)
    masks: dict[str, Tensor | None] = {"linear_attention": None}
    for name, window in windows.items():
        reach = positions[:1] if is_even else positions
        reach = reach if window is None else reach.clamp(max=window - 1)
        mask = attention_mask(reach, AttentionWindow(window).kept(known))
        masks[name] = added_mask(mask, model.dtype) if implementation == "eager" else mask
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
