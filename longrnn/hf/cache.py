"""Converts the caches of Hugging Face models to immutable states, and back.

A model changes its cache object in place. A state keeps the tensors of the cache instead: those
that a layer only ever replaces (keys and values grow by concatenation) are shared, and those that
it changes in place (convolution inputs, recurrent states) are copied when a cache is restored.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import DynamicCache, EncoderDecoderCache, cache_utils

from longrnn.errors import UserError
from longrnn.hf.attention_window import AttentionWindow, WindowCall
from longrnn.state import History, PyTree

# Cache layers all of whose tensors are converted below.
CONVERTED_LAYERS = (
    cache_utils.DummyLayer,
    cache_utils.DynamicLayer,
    cache_utils.DynamicSlidingWindowLayer,
    cache_utils.LinearAttentionAndFullAttentionLayer,
    cache_utils.LinearAttentionAndSlidingWindowAttentionLayer,
    cache_utils.LinearAttentionLayer,
)
# Fields of a `LayerCache`, and the attributes of a cache layer that have their tensors by index.
RECURRENT = {"conv": "conv_states", "recurrent": "recurrent_states"}


class LayerCache(NamedTuple):
    """Tensors of one layer of a `DynamicCache`; an empty tuple for what the layer does not have.

    Attributes:
        keys: entries `(b, h, t, d)`; for a sliding window the last `window − 1`.
        values: likewise.
        conv: the last inputs of each convolution, each `(b, …)`.
        recurrent: the recurrent states, each `(b, …)`.
        cell: the state of the cell of longrnn that computes the layer; () without one.
        unrotated: in the place of `keys`, keys without their rotary rotation (`WindowCall`).
    """

    keys: History | tuple[()] = ()
    values: History | tuple[()] = ()
    conv: tuple[Tensor | tuple[()], ...] = ()
    recurrent: tuple[Tensor | tuple[()], ...] = ()
    cell: PyTree = ()
    unrotated: History | tuple[()] = ()


class UncutCache(DynamicCache):
    """A `DynamicCache` in which a layer with a window of attention drops no keys in a call.

    Args:
        config: of the model.

    Attributes:
        latest: the number of the layer to which keys were added last.
        rnn_state: what an xLSTM takes from its cache for each layer, and writes to.
    """

    latest = 0

    def __init__(self, config: Any) -> None:
        super().__init__(config=config)
        self.rnn_state = [()] * len(self.layers)
        self._linear: dict[int, Tensor] = {}

    def get_linear_cache(self, layer_idx: int) -> Tensor | None:
        """Return what a MiniMax has written for a layer; None for nothing."""
        return self._linear.get(layer_idx)

    def set_linear_cache(self, layer_idx: int, linear_cache: Tensor) -> None:
        """Keep what a MiniMax writes for a layer."""
        self._linear[layer_idx] = linear_cache

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Add keys and values to a layer, and return all of them."""
        self.latest = layer_idx
        whole = super().update(key_states, value_states, layer_idx, *args, **kwargs)
        layer: Any = self.layers[layer_idx]
        layer.keys, layer.values = whole  # of which a layer with a window has kept a part
        return whole


def keep_cache(
    cache: Any,
    calls: Sequence[WindowCall] | None = None,
    *,
    keys: str = "keys",
    dtype: torch.dtype | None = None,
    cells: Mapping[int, PyTree] | None = None,
) -> tuple[LayerCache, ...]:
    """Returns the tensors of each layer of a cache.

    Args:
        cache: after a call.
        calls: of each layer, which say what the state holds; None for all keys.
        keys: name of the field for the keys.
        dtype: of keys and values in the state; None for that of the call.
        cells: states of cells of longrnn, by the number of their layer.

    Raises:
        ValueError: there is no cache, or it is of an unknown kind; the message says why.
    """
    if cache is None:
        raise ValueError("it returns no cache")
    # A decoder that supports cross-attention but is used without an encoder.
    if type(cache) is EncoderDecoderCache and not cache.cross_attention_cache.get_seq_length():
        cache = cache.self_attention_cache
    if type(cache) not in (DynamicCache, UncutCache):
        raise ValueError(f"its cache is a {type(cache).__name__}")
    entries_of_cache: list[Any] = cache.layers
    layers = []
    for number, layer in enumerate(entries_of_cache):
        if type(layer) not in CONVERTED_LAYERS:
            raise ValueError(f"its cache has a {type(layer).__name__}")
        fields: dict[str, Any] = {} if cells is None else {"cell": cells.get(number, ())}
        for field, name in RECURRENT.items():
            states = getattr(layer, name, {}).values()
            fields[field] = tuple(() if state is None else state for state in states)
        if getattr(layer, "keys", None) is not None:
            for field, entries in ((keys, layer.keys), ("values", layer.values)):
                kept = entries if calls is None else calls[number].keep(entries)
                fields[field] = History(released(kept.to(dtype or kept.dtype)))
        layers.append(LayerCache(**fields))
    return tuple(layers)


def fill_cache(
    cache: DynamicCache,
    layers: tuple[LayerCache, ...],
    position: int,
    windows: Sequence[AttentionWindow] | None = None,
) -> None:
    """Writes `layers` into an empty cache; no row has read more than `position` tokens.

    Args:
        cache: of the next call.
        layers: of the state.
        position: of the row that has read the most.
        windows: of each layer under an `attention_window`; None without.

    Raises:
        UserError: the layers are of a model with another window of attention.
    """
    # A cache without a configuration creates its layers on first use.
    cache.layers += [cache_utils.DynamicLayer() for _ in layers[len(cache.layers) :]]
    entries: list[Any] = cache.layers
    for number, (layer, kept) in enumerate(zip(entries, layers, strict=True)):
        for field, name in RECURRENT.items():
            for index, state in enumerate(getattr(kept, field)):
                if isinstance(state, Tensor):
                    layer.lazy_initialization(**{name: state, "state_idx": index})
                    getattr(layer, name)[index].copy_(state)
                    layer.has_previous_state[index] = True
        sliding = getattr(layer, "sliding_window", None)
        window = AttentionWindow(sliding) if windows is None else windows[number]
        if sliding is not None:
            layer.cumulative_length = position
        history, needed = kept.keys or kept.unrotated, window.kept(position)
        if not (needed and isinstance(history, History) and isinstance(kept.values, History)):
            continue
        keys, values = history.entries, kept.values.entries
        if not needed <= keys.shape[-2] <= window.reach:
            raise UserError(
                f"the state has {keys.shape[-2]} keys after {position} tokens, and this model has "
                f"{needed}: give a state of a model with the same attention_window"
            )
        layer.lazy_initialization(keys, values)
        # Without the padding that rows with a longer history left in front.
        layer.keys, layer.values = keys[..., -needed:, :], values[..., -needed:, :]


def released(entries: Tensor) -> Tensor:
    """Returns entries, copied if they are part of a longer tensor, so that its memory is freed."""
    is_part = entries.untyped_storage().nbytes() > entries.nbytes
    return entries.clone() if is_part else entries
