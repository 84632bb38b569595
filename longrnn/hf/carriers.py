"""How each kind of Hugging Face model is given what it remembers, and gives it back.

Most take and return a `DynamicCache`. A carrier of its own stands here for each that does not; the
first of `CARRIERS` that knows a model is used.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Container
from typing import Any, ClassVar

from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicCache, DynamicLayer, EncoderDecoderCache

from longrnn.errors import UserError
from longrnn.hf.cache import LayerCache, fill_cache, keep_cache, restore_cache


class Carrier(ABC):
    """Turns what a model remembers into the layers of a state, and back.

    Args:
        model: the model.
        name: of the argument that takes the cache, and of the output's field.
    """

    names: ClassVar[tuple[str, ...]] = ("past_key_values", "cache_params")
    kinds: ClassVar[tuple[str, ...]] = ()

    def __init__(self, model: PreTrainedModel, name: str) -> None:
        self.model, self.name = model, name
        self.config: Any = model.config

    def start(self) -> Any:
        """What to give to a model that has read nothing."""
        return None

    @abstractmethod
    def restore(self, layers: tuple[Any, ...], position: int) -> Any:
        """What to give to a model so that it continues from `layers`, all rows after `position`
        tokens."""

    def after(self, output: Any, given: Any) -> Any:
        """What the model remembers after a call that was given `given`; None for nothing."""
        return output.get(self.name)

    @abstractmethod
    def keep(self, cache: Any) -> tuple[Any, ...]:
        """The layers of a state, from what `after` found.

        Raises:
            UserError: it is of a kind that is not known.
        """


class DynamicCarrier(Carrier):
    """A `DynamicCache`: attention, with sliding windows or without, recurrent layers, or both."""

    def restore(self, layers: tuple[LayerCache, ...], position: int) -> DynamicCache:
        return restore_cache(layers, position, self.config)

    def keep(self, cache: Any) -> tuple[LayerCache, ...]:
        # A decoder that could attend to an encoder, and has none.
        if type(cache) is EncoderDecoderCache and not cache.cross_attention_cache.get_seq_length():
            cache = cache.self_attention_cache
        if type(cache) is not DynamicCache:
            raise UserError(f"its cache is a {type(cache).__name__}, which cannot be forked")
        return keep_cache(cache)


class TensorCarrier(Carrier):
    """A list of tensors with the batch first, into which the model writes: RWKV."""

    names = ("state",)

    def restore(self, layers: tuple[Tensor, ...], position: int) -> list[Tensor]:
        return [tensor.clone() for tensor in layers]

    def keep(self, cache: Any) -> tuple[Tensor, ...]:
        if not isinstance(cache, (list, tuple)) or not all(isinstance(t, Tensor) for t in cache):
            raise UserError(f"its state is a {type(cache).__name__}, which cannot be forked")
        return tuple(cache)


class MiniMaxCarrier(Carrier):
    """A `MiniMaxCache`: beside keys and values one matrix per layer of linear attention."""

    kinds = ("minimax",)

    def restore(self, layers: tuple[LayerCache, ...], position: int) -> Any:
        from transformers.models.minimax.modeling_minimax import MiniMaxCache

        cache: Any = MiniMaxCache()
        fill_cache(cache, tuple(layer._replace(recurrent=()) for layer in layers), position)
        # The model replaces these matrices and never writes into them.
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
    """An `xLSTMCache`: three tensors per layer, into which the model writes."""

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
    """Keys and values in a `DynamicCache`, and recurrent states inside of the model's modules.

    The modules hold what the carrier puts there before each call, and nothing after it.
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
                # The model replaces these tensors and never writes into them.
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
    """The carrier for a model; None where it takes no cache.

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
