"""Converts the cache of a Hugging Face model to the layers of a state, and back.

Most models take and return a `DynamicCache`; each that does not has its own carrier here. The first
of `CARRIERS` that matches a model is used.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Container
from typing import Any, ClassVar

from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicCache, DynamicLayer, EncoderDecoderCache

from longrnn.hf.cache import LayerCache, NotForkableError, fill_cache, keep_cache, restore_cache


class Carrier(ABC):
    """Converts the cache of a model to the layers of a state, and back.

    Args:
        model: the model.
        name: name of the forward argument that takes the cache, and of the output field.

    Attributes:
        names: names that `name` may have.
        kinds: model types that the carrier is for; empty for any.
    """

    names: ClassVar[tuple[str, ...]] = ("past_key_values", "cache_params")
    kinds: ClassVar[tuple[str, ...]] = ()

    def __init__(self, model: PreTrainedModel, name: str) -> None:
        self.model, self.name = model, name
        self.config: Any = model.config

    def start(self) -> Any:
        """Return the cache argument for a model that has read no token."""
        return None

    @abstractmethod
    def restore(self, layers: tuple[Any, ...], position: int) -> Any:
        """Return the cache with which a model continues from `layers`.

        Every row has read `position` tokens.
        """

    def arguments(self, tokens: Tensor, position: int) -> dict[str, Any]:
        """Return further arguments of a call with `tokens` `(b, t)` after `position` tokens."""
        return {}

    def after(self, output: Any, given: Any) -> Any:
        """Return the cache after a call that was given the cache `given`; None if there is none."""
        return output.get(self.name)

    @abstractmethod
    def keep(self, cache: Any) -> tuple[Any, ...]:
        """Return the layers of a state from the cache that `after` returned.

        Raises:
            NotForkableError: the cache is of an unknown kind.
        """


class DynamicCarrier(Carrier):
    """A `DynamicCache`: attention with or without sliding windows, recurrent layers, or both."""

    def restore(self, layers: tuple[LayerCache, ...], position: int) -> DynamicCache:
        return restore_cache(layers, position, self.config)

    def keep(self, cache: Any) -> tuple[LayerCache, ...]:
        # A decoder that supports cross-attention but is used without an encoder.
        if type(cache) is EncoderDecoderCache and not cache.cross_attention_cache.get_seq_length():
            cache = cache.self_attention_cache
        if type(cache) is not DynamicCache:
            raise NotForkableError(f"its cache is a {type(cache).__name__}")
        return keep_cache(cache)


class TensorCarrier(Carrier):
    """A list of tensors `(b, …)`, which the model changes in place: RWKV."""

    names = ("state",)

    def restore(self, layers: tuple[Tensor, ...], position: int) -> list[Tensor]:
        return [tensor.clone() for tensor in layers]

    def keep(self, cache: Any) -> tuple[Tensor, ...]:
        if not isinstance(cache, (list, tuple)) or not all(isinstance(t, Tensor) for t in cache):
            raise NotForkableError(f"its state is a {type(cache).__name__}")
        return tuple(cache)


class MiniMaxCarrier(Carrier):
    """A `MiniMaxCache`: keys and values, and one matrix per layer of linear attention."""

    kinds = ("minimax",)

    def restore(self, layers: tuple[LayerCache, ...], position: int) -> Any:
        from transformers.models.minimax.modeling_minimax import MiniMaxCache

        cache: Any = MiniMaxCache()
        fill_cache(cache, tuple(layer._replace(recurrent=()) for layer in layers), position)
        # The model replaces these matrices and never changes them in place: no copy is needed.
        cache.linear_cache = [layer.recurrent[0] if layer.recurrent else [] for layer in layers]
        return cache

    def keep(self, cache: Any) -> tuple[LayerCache, ...]:
        cache.layers += [DynamicLayer() for _ in cache.linear_cache[len(cache.layers) :]]
        layers = keep_cache(cache)
        found = [*cache.linear_cache, *[[] for _ in layers]]
        return tuple(
            layer._replace(recurrent=(matrix,)) if isinstance(matrix, Tensor) else layer
            for layer, matrix in zip(layers, found, strict=False)
        )


class XLSTMCarrier(Carrier):
    """An `xLSTMCache`: three tensors per layer, which the model changes in place."""

    kinds = ("xlstm",)

    def restore(self, layers: tuple[Any, ...], position: int) -> Any:
        from transformers.models.xlstm.modeling_xlstm import xLSTMCache

        first: Tensor = layers[0][0]
        cache = xLSTMCache(self.config, len(first), dtype=first.dtype, device=str(first.device))
        cache.seqlen_offset += position
        cache.rnn_state = {
            index: tuple(tensor.clone() for tensor in layer) for index, layer in enumerate(layers)
        }
        return cache

    def keep(self, cache: Any) -> tuple[tuple[Tensor, ...], ...]:
        return tuple(tuple(state) for state in cache.rnn_state.values())


class RecurrentGemmaCarrier(Carrier):
    """Keys and values in a `DynamicCache`, and recurrent states in attributes of the modules.

    The carrier sets these attributes before each call and clears them after it.
    """

    kinds = ("recurrent_gemma",)

    def start(self) -> DynamicCache:
        for block in self._blocks():
            if hasattr(block, "rg_lru"):
                block.conv1d_state = block.rg_lru.recurrent_states = None
        return DynamicCache(config=self.config)

    def restore(self, layers: tuple[LayerCache, ...], position: int) -> DynamicCache:
        attention = tuple(layer._replace(conv=(), recurrent=()) for layer in layers)
        for block, layer in zip(self._blocks(), layers, strict=True):
            if layer.recurrent:
                # The model replaces these tensors and never changes them in place.
                block.conv1d_state, block.rg_lru.recurrent_states = (
                    layer.conv[0],
                    layer.recurrent[0],
                )
        cache = DynamicCache(config=self.config)
        fill_cache(cache, attention, position)
        return cache

    def after(self, output: Any, given: Any) -> Any:
        return given

    def keep(self, cache: Any) -> tuple[LayerCache, ...]:
        kept = []
        for block, layer in zip(self._blocks(), keep_cache(cache), strict=True):
            if hasattr(block, "rg_lru"):
                conv, recurrent = block.conv1d_state, block.rg_lru.recurrent_states
                layer = LayerCache(conv=(conv,), recurrent=(recurrent,))
                block.conv1d_state = block.rg_lru.recurrent_states = None
            kept.append(layer)
        return tuple(kept)

    def _blocks(self) -> list[Any]:
        layers: Any = self.model.base_model.layers
        assert isinstance(layers, nn.ModuleList)
        return [layer.temporal_block for layer in layers]


CARRIERS: tuple[type[Carrier], ...] = (
    MiniMaxCarrier,
    XLSTMCarrier,
    RecurrentGemmaCarrier,
    DynamicCarrier,
    TensorCarrier,
)


def find_carrier(model: PreTrainedModel, accepted: Container[str]) -> Carrier | None:
    """Return the carrier for a model; None if its forward takes no cache.

    Args:
        model: the model.
        accepted: names of the arguments of its forward.
    """
    for carrier in CARRIERS:
        if not carrier.kinds or model.config.model_type in carrier.kinds:
            for name in carrier.names:
                if name in accepted:
                    return carrier(model, name)
    return None
