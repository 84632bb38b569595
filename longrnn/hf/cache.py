"""The caches of transformers as states that are values, and back.

A cache is an object that a model changes in place. A state keeps its tensors instead: what a layer
only ever replaces (keys and values grow by concatenation) is handed over as it is, what it writes
into (convolutions, recurrent states) is copied first.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

from torch import Tensor
from transformers import PreTrainedConfig
from transformers.cache_utils import (
    DummyLayer,
    DynamicCache,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionAndSlidingWindowAttentionLayer,
    LinearAttentionLayer,
)

from longrnn.errors import UserError
from longrnn.state import History

# Layers whose tensors are all taken over below.
KNOWN = (
    DummyLayer,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionAndSlidingWindowAttentionLayer,
    LinearAttentionLayer,
)


class LayerCache(NamedTuple):
    """What one layer of a `DynamicCache` holds; an empty tuple where it holds none.

    Attributes:
        keys: entries `(b, h, t, d)`, of a sliding window the last `window − 1`.
        values: likewise.
        conv: the last inputs of each convolution, `(b, …)`.
        recurrent: each recurrent state, `(b, …)`.
    """

    keys: History | tuple[()] = ()
    values: History | tuple[()] = ()
    conv: tuple[Tensor | tuple[()], ...] = ()
    recurrent: tuple[Tensor | tuple[()], ...] = ()


class Carrier(Protocol):
    """How one kind of model is given what it remembers, by which argument and of which output.

    Attributes:
        name: of the argument, and of the field of the output.
    """

    name: str

    def keep(self, cache: Any) -> tuple[Any, ...]:
        """The layers of a state, from what a model returned.

        Raises:
            UserError: it is of a kind that is not known.
        """
        ...

    def restore(self, layers: tuple[Any, ...], position: int) -> Any:
        """What to give to a model so that it goes on from `layers`, all rows after `position`
        tokens."""
        ...


class DynamicCarrier:
    """A `DynamicCache`: attention, with sliding windows or without, recurrent layers, or both."""

    def __init__(self, name: str, config: PreTrainedConfig) -> None:
        self.name, self.config = name, config

    def keep(self, cache: Any) -> tuple[LayerCache, ...]:
        if type(cache) is not DynamicCache:
            raise UserError(f"its cache is a {type(cache).__name__}, which cannot be forked")
        for layer in cache.layers:
            if type(layer) not in KNOWN:
                raise UserError(f"its cache has a {type(layer).__name__}, which cannot be forked")
        return tuple(_keep(layer) for layer in cache.layers)

    def restore(self, layers: tuple[LayerCache, ...], position: int) -> DynamicCache:
        cache = DynamicCache(config=self.config)
        # Layers that no configuration announces are made when they are first written.
        cache.layers += [DynamicLayer() for _ in layers[len(cache.layers) :]]
        for layer, kept in zip(cache.layers, layers, strict=True):
            _restore(layer, kept, position)
        return cache


class TensorCarrier:
    """A list of tensors with the batch first, into which the model writes: RWKV."""

    def __init__(self, name: str) -> None:
        self.name = name

    def keep(self, cache: Any) -> tuple[Tensor, ...]:
        if not isinstance(cache, (list, tuple)) or not all(isinstance(t, Tensor) for t in cache):
            raise UserError(f"its state is a {type(cache).__name__}, which cannot be forked")
        return tuple(cache)

    def restore(self, layers: tuple[Tensor, ...], position: int) -> list[Tensor]:
        return [tensor.clone() for tensor in layers]


def _keep(layer: Any) -> LayerCache:
    keys: Any = ()
    values: Any = ()
    if getattr(layer, "keys", None) is not None:
        keys, values = History(layer.keys), History(layer.values)
    numbers = range(getattr(layer, "number_of_states", 0))
    conv = tuple(_or_empty(layer.conv_states[i]) for i in numbers)
    recurrent = tuple(_or_empty(layer.recurrent_states[i]) for i in numbers)
    return LayerCache(keys, values, conv, recurrent)


def _or_empty(tensor: Tensor | None) -> Tensor | tuple[()]:
    return () if tensor is None else tensor


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
        if isinstance(layer, DynamicSlidingWindowLayer):
            layer.cumulative_length = position
