"""The layers of a hybrid: how ours take the place of those of transformers, and recomputation."""

import copy
from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from longrnn.cells import Cell
from longrnn.hf.hybrid.cache import CacheEntry, HybridCache
from longrnn.hf.hybrid.families import FAMILIES

# The key of a configuration with the numbers of the layers whose recurrence is used; the output of
# all others is 0. None for all layers.
MEMORIES_KEY = "longrnn_memories"


class HybridForward:
    """The `forward` of a recurrent layer in a hybrid: that of our cell if the cache is a hybrid's.

    A class and not a closure, so that a copy of the layer runs the copy of the cell.

    Args:
        layer: the layer of transformers.
        index: its number in the model, embeddings not counted.
        cell: our cell on its weights; None for a layer whose output is 0.
        returns_state: whether the layer returns its output and a state, which is None here.
    """

    def __init__(self, layer: Any, index: int, cell: Cell | None, returns_state: bool) -> None:
        self.layer, self.index, self.cell = layer, index, cell
        self.returns_state = returns_state

    def __call__(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        cache = given_cache([*args, *kwargs.values()])
        if cache is None:
            return type(self.layer).forward(self.layer, hidden_states, *args, **kwargs)
        if self.cell is None:
            return torch.zeros_like(hidden_states)
        edit, states = cache.edits[self.index], cache.cells
        if self.index not in states:
            states[self.index] = self.cell.init_state(len(hidden_states), edit)
        # The state is replaced and never changed in place, so that no copy is needed.
        y, states[self.index] = self.cell(hidden_states, states[self.index], edit, cache.rows)
        return (y, None) if self.returns_state else y


class RecomputedForward:
    """The `forward` of a whole layer whose activations the backward pass computes again.

    transformers' own recomputation drops the cache, and with it the state.

    Args:
        layer: the layer of transformers, with attention and all.
        index: its number in the model.
    """

    def __init__(self, layer: Any, index: int) -> None:
        self.layer, self.index = layer, index

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        cache, index = given_cache([*args, *kwargs.values()]), self.index
        if cache is None or not torch.is_grad_enabled():
            return type(self.layer).forward(self.layer, *args, **kwargs)
        layers, states = list(cache.layers), dict(cache.cells)

        def run(*args: Any, **kwargs: Any) -> Any:
            # From the state before the layer, also when the backward pass runs it again. What that
            # computes is dropped when it runs the layer before.
            cache.layers, cache.cells = list(layers), dict(states)
            cache.layers[index] = copy.copy(layers[index])
            with nullcontext() if cache.attention is None else cache.attention.reading():
                return type(self.layer).forward(self.layer, *args, **kwargs)

        return checkpoint(run, *args, use_reentrant=False, **kwargs)


def given_cache(arguments: list[Any]) -> HybridCache | None:
    """The cache among the arguments of a layer, whose names and places differ by architecture."""
    for argument in arguments:
        if isinstance(argument, HybridCache):
            return argument
        if isinstance(argument, CacheEntry):
            return argument.cache
    return None


def whole_layers(model: PreTrainedModel) -> list[Any]:
    """The layers of a model from residual stream to residual stream, the first one first."""
    lists = [part for part in model.base_model.children() if isinstance(part, nn.ModuleList)]
    return next(list(each) for each in lists if isinstance(each[0], GradientCheckpointingLayer))


def recurrent_layers(model: PreTrainedModel) -> Mapping[int, Any]:
    """Return the recurrent layers of a hybrid by their number in the model; empty for others."""
    family = FAMILIES.get(model.config.model_type)
    name = family and family.layer
    return {
        next(int(part) for part in path.split(".") if part.isdigit()): module
        for path, module in model.named_modules()
        if type(module).__name__ == name
    }


def restore_layers(model: PreTrainedModel) -> None:
    """Make transformers compute the recurrent layers of what was a `HybridLM`."""
    for layer in recurrent_layers(model).values():
        vars(layer).pop("forward", None)
