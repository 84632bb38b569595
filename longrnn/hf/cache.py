"""Converts the caches of Hugging Face models to immutable states, and back.

A model changes its cache object in place. A state keeps the tensors of the cache instead: those
that a layer only ever replaces (keys and values grow by concatenation) are shared, and those that
it changes in place (convolution inputs, recurrent states) are copied when a cache is restored.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor
from transformers import DynamicCache, EncoderDecoderCache, cache_utils

from longrnn.errors import UserError
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


class LayerCache(NamedTuple):
    """Tensors of one layer of a `DynamicCache`; an empty tuple for what the layer does not have.

    Attributes:
        keys: entries `(b, h, t, d)`; for a sliding window the last `window − 1`.
        values: likewise.
        conv: the last inputs of each convolution, each `(b, …)`.
        recurrent: the recurrent states, each `(b, …)`.
        cell: the state of the cell of longrnn that computes the layer; () without one.
    """

    keys: History | tuple[()] = ()
    values: History | tuple[()] = ()
    conv: tuple[Tensor | tuple[()], ...] = ()
    recurrent: tuple[Tensor | tuple[()], ...] = ()
    cell: PyTree = ()


def keep_cache(cache: Any) -> tuple[LayerCache, ...]:
    """Returns the tensors of each layer of a cache.

    Raises:
        ValueError: there is no cache, or it is of an unknown kind; the message says why.
    """
    if cache is None:
        raise ValueError("it returns no cache")
    # A decoder that supports cross-attention but is used without an encoder.
    if type(cache) is EncoderDecoderCache and not cache.cross_attention_cache.get_seq_length():
        cache = cache.self_attention_cache
    if type(cache) is not DynamicCache:
        raise ValueError(f"its cache is a {type(cache).__name__}")
    for layer in cache.layers:
        if type(layer) not in CONVERTED_LAYERS:
            raise ValueError(f"its cache has a {type(layer).__name__}")
    return tuple(map(_keep, cache.layers))


def fill_cache(cache: DynamicCache, layers: tuple[LayerCache, ...], position: int) -> None:
    """Writes `layers` into an empty cache; every row has read `position` tokens.

    Raises:
        UserError: the layers are of a model with another window of attention.
    """
    # A cache without a configuration creates its layers on first use.
    cache.layers += [cache_utils.DynamicLayer() for _ in layers[len(cache.layers) :]]
    for layer, kept in zip(cache.layers, layers, strict=True):
        _restore(layer, kept, position)


def _keep(layer: Any) -> LayerCache:
    keys: Any = ()
    values: Any = ()
    if getattr(layer, "keys", None) is not None:
        keys, values = History(layer.keys), History(layer.values)
    conv, recurrent = (
        tuple(() if state is None else state for state in getattr(layer, name, {}).values())
        for name in ("conv_states", "recurrent_states")
    )
    return LayerCache(keys, values, conv, recurrent)


def _restore(layer: Any, kept: LayerCache, position: int) -> None:
    for i, (conv, recurrent) in enumerate(zip(kept.conv, kept.recurrent, strict=True)):
        for name, tensor in (("conv_states", conv), ("recurrent_states", recurrent)):
            if isinstance(tensor, Tensor):
                layer.lazy_initialization(**{name: tensor, "state_idx": i})
                getattr(layer, name)[i].copy_(tensor)
                layer.has_previous_state[i] = True
    if isinstance(kept.keys, History) and isinstance(kept.values, History):
        keys, values = kept.keys.entries, kept.values.entries
        layer.lazy_initialization(keys, values)
        layer.keys, layer.values = keys, values
        known = position
        if isinstance(layer, cache_utils.DynamicSlidingWindowLayer):
            layer.cumulative_length = position
            known = min(position, layer.sliding_window - 1)
        if keys.shape[-2] != known:
            raise UserError(
                f"the state has {keys.shape[-2]} keys after {position} tokens, and this model has "
                f"{known}: give a state of a model with the same attention_window"
            )
