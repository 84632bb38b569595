"""The layers of a hybrid: how ours take the place of those of transformers, and recomputation."""

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from longrnn.cells import Cell, Edit
from longrnn.hf.cache import UncutCache
from longrnn.hf.hybrid.families import FAMILIES
from longrnn.hf.hybrid.shared_cell import LayerCell
from longrnn.hf.windowed import WindowedCall
from longrnn.ops.rows import Rows
from longrnn.state import PyTree

# The key of a configuration with the numbers of the layers whose recurrence is used; the output of
# all others is 0. None for all layers.
MEMORIES_KEY = "longrnn_memories"


_call: ContextVar["HybridCall | None"] = ContextVar("call", default=None)


@dataclass
class HybridCall:
    """One call of a hybrid.

    Attributes:
        cache: for the layers of attention.
        states: of the cells, by their layer's number in the model; empty before the first token.
        edits: of the cells, likewise.
        rows: where documents and padding begin; None for rows of one document.
        attention: computes the attention of the call; None for transformers alone.
    """

    cache: UncutCache
    states: dict[int, PyTree]
    edits: Mapping[int, Edit | None]
    rows: Rows | None
    attention: WindowedCall | None

    @contextmanager
    def running(self) -> Iterator[Self]:
        """A context in which the layers of the model compute this call."""
        token = _call.set(self)
        try:
            with nullcontext() if self.attention is None else self.attention.reading():
                yield self
        finally:
            _call.reset(token)


class HybridForward:
    """The `forward` of a recurrent layer in a hybrid: that of our cell in a `HybridCall`.

    A class and not a closure, so that a copy of the layer runs the copy of the cell.

    Args:
        layer: the layer of transformers.
        index: its number in the model, embeddings not counted.
        cell: our cell on its weights; None for a layer whose output is 0.
    """

    def __init__(self, layer: Any, index: int, cell: Cell | None) -> None:
        self.layer, self.index, self.cell = layer, index, cell

    def __call__(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        call = _call.get()
        if call is None:
            return type(self.layer).forward(self.layer, hidden_states, *args, **kwargs)
        if self.cell is None:
            return torch.zeros_like(hidden_states)
        edit, states = call.edits[self.index], call.states
        if self.index not in states:
            states[self.index] = self.cell.init_state(len(hidden_states), edit)
        # The state is replaced and never changed in place, so that no copy is needed.
        y, states[self.index] = self.cell(hidden_states, states[self.index], edit, call.rows)
        return (y, None) if isinstance(self.cell, LayerCell) else y


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
        call, index = _call.get(), self.index
        if call is None or not torch.is_grad_enabled():
            return type(self.layer).forward(self.layer, *args, **kwargs)
        layers, states = list(call.cache.layers), dict(call.states)

        def run(*args: Any, **kwargs: Any) -> Any:
            # From the state before the layer, also when the backward pass runs it again. What that
            # computes is dropped when it runs the layer before.
            call.cache.layers, call.states = list(layers), dict(states)
            call.cache.layers[index] = copy.copy(layers[index])
            with call.running():
                return type(self.layer).forward(self.layer, *args, **kwargs)

        return checkpoint(run, *args, use_reentrant=False, **kwargs)


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
