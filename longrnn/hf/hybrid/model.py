"""`HybridLM`: a Hugging Face model whose recurrent layers are computed by our cells.

In a `HybridCall`, a recurrent layer of transformers is computed by our cell, with the state and the
edit of the call; otherwise it computes what it always did. The layer itself and the names of its
weights do not change.

When a hybrid is opened, `longrnn.hf.probe` compares its logits in pieces, computed by our cells,
with those of one call without a cache, which transformers computes alone. A model with a layer that
differs from the table of `families` is therefore computed by transformers alone, as a `ForeignLM`.

Notable choices:
- Attention reads the keys of the state by a mask: how many tokens before it a token reads follows
  from its position in its document and the window. So rows that have read different numbers of
  tokens, padded rows and packed documents go through the model in one call.
- A call with gradients goes through the model as a whole, any other call in pieces.
"""

import copy
from collections.abc import Sequence
from typing import Any, Self

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import CacheLayerMixin

from longrnn.cells import Cell
from longrnn.hf.attention_window import AttentionWindow, WindowCall, added_mask, window_calls
from longrnn.hf.cache import fill_cache, keep_cache
from longrnn.hf.foreign import ForeignLM
from longrnn.hf.hybrid.families import FAMILIES
from longrnn.hf.hybrid.layers import (
    MEMORIES_KEY,
    HybridCall,
    HybridForward,
    RecomputedForward,
    recurrent_layers,
    whole_layers,
)
from longrnn.hf.windowed import masked_implementation
from longrnn.mitigations.spec import ATTENTION_WINDOW
from longrnn.models.base import refuse_long
from longrnn.models.trainable import TrainableLM
from longrnn.ops.rows import Rows, positions_of
from longrnn.state import LMState, PyTree


class HybridLM(TrainableLM, ForeignLM):  # pyright: ignore
    """A Hugging Face model with recurrent layers, for training, evaluation and diagnosis.

    The layers are counted without the others: layer 0 of a mitigation or a diagnosis is the first
    recurrent layer, whose number in the model is `layer_numbers[0]`.

    Args:
        model: a causal language model of an architecture in `FAMILIES`.

    Attributes:
        layer_numbers: the number in the model of each recurrent layer; without those whose output
            is 0 by `MEMORIES_KEY`.

    Raises:
        UserError: see `ForeignLM`.
        UnsupportedLayerError: an option of its recurrent layers that the cells do not have.
    """

    _attends = False

    def __init__(self, model: PreTrainedModel) -> None:
        layers, used = recurrent_layers(model), getattr(model.config, MEMORIES_KEY, None)
        family = FAMILIES[model.config.model_type]
        # A list, because the weights are already in `model`.
        self._cells: list[Cell] = []
        self.layer_numbers: list[int] = []
        for number, layer in layers.items():
            cell = None
            if used is None or number in used:
                cell = family.cell(layer, family)
                self._cells.append(cell)
                self.layer_numbers.append(number)
            else:
                layer.requires_grad_(False)
            layer.forward = HybridForward(layer, number, cell)
        entries = DynamicCache(config=model.config).layers
        # The window that the architecture gives each layer of attention, and all of them.
        self._sliding = [getattr(entry, "sliding_window", None) for entry in entries]
        self._family_window: int | None = (
            getattr(model.config, family.window) if family.window else None
        )
        # transformers asks a cache without a layer of attention for its length.
        self._is_cached = any(isinstance(entry, CacheLayerMixin) for entry in entries)
        self._logit_scale = family.logit_scale(model.config)
        self.soft_cap = None if family.soft_cap is None else getattr(model.config, family.soft_cap)
        super().__init__(model)
        self._attends = self.has_keys

    @property
    def cells(self) -> list[Cell]:
        """The cell of each recurrent layer, on the weights of the model."""
        return self._cells

    @property
    def head(self) -> Any:  # pyright: ignore
        """See `TrainableLM`."""
        return self.model.get_output_embeddings()

    @property
    def blocks(self) -> list[Any]:  # pyright: ignore
        """See `TrainableLM`."""
        return whole_layers(self.model)

    def gradient_checkpointing_enable(self, enabled: bool = True) -> None:
        """See `TrainableLM`."""
        for index, block in enumerate(self.blocks):
            vars(block).pop("forward", None)
            if enabled:
                block.forward = RecomputedForward(block, index)

    def in_float64(self) -> Self:
        """See `TrainableLM`; the copy has no mitigation."""
        other = type(self)(copy.deepcopy(self.model).double())
        other.max_length = self.max_length
        other = other if self.attention is None else other.attending(self.attention.window)
        return other.starting_from(self.start)

    def cell_states(self, state: LMState) -> list[PyTree]:
        """Return the state of each cell."""
        return [state.layers[number].cell for number in self.layer_numbers]

    def under(self, mitigation: Any) -> Self:
        """See `LanguageModel.under`."""
        other = super().under(mitigation)
        layers = list(self.like)
        for number, cell, edit in zip(self.layer_numbers, self.cells, other.edits, strict=True):
            # A window has a state of its own.
            layers[number] = layers[number]._replace(cell=cell.like(edit))
        other._like = self._like[0], tuple(layers)
        return other.starting_from(other.start)

    @property
    def attends_to_all(self) -> bool:
        """Whether the architecture has attention layers without a window."""
        pairs = zip(self._sliding, self.like, strict=True)
        return any(window is None and layer.keys != () for window, layer in pairs)

    @property
    def spec(self) -> str | None:
        """See `TrainableLM`; with the window of attention."""
        window = self.attention_window
        named = None if window is None else f"{ATTENTION_WINDOW}{window}"
        return "+".join(filter(None, [named, super().spec])) or None

    def segment_width(self, batch_size: int, time: int) -> int:
        """See `TrainableLM`: a call with gradients goes through the model as a whole."""
        return max(1, time) if torch.is_grad_enabled() else self.call_length(batch_size)

    def call(
        self, tokens: Tensor, state: LMState, keep: int, rows: Rows | None = None
    ) -> tuple[Tensor, LMState]:
        """See `ForeignLM.call`."""
        hidden, after = self.segment(tokens, state, rows, None)
        return self.logits(hidden), after

    def segment(
        self, tokens: Tensor, state: LMState, rows: Rows | None, observe: list[Tensor] | None
    ) -> tuple[Tensor, LMState]:
        """See `TrainableLM`: one call of the model.

        Raises:
            UserError: more tokens than `max_length`.
        """
        before, time = state.position, tokens.shape[1]
        positions, after = positions_of(before, time, rows)
        last = int(positions.max())
        refuse_long(self, last + 1)
        attention = self.attention and self.attention.call(before, time, rows)
        # While no window is full, rows that have read as many tokens keep all keys, and have the
        # masks of transformers.
        is_even = rows is None and bool((before == before[0]).all())
        calls = None if attention is None else attention.calls
        if calls is None and not (is_even and all(last < w.reach for w in self.windows)):
            calls = window_calls(self.windows, before, time, rows)
        cache, cells = self.new_cache(), dict[int, PyTree]()
        if state.layers:
            fill_cache(cache, state.layers, int(before.max()), self.windows)
            cells = dict(zip(self.layer_numbers, self.cell_states(state), strict=True))
        given: dict[str, Any] = {}
        if observe is not None:
            given["output_hidden_states"] = True
        if attention is None and self._attends and calls is not None:
            given["attention_mask"] = self._masks(calls)
        places = positions if attention is None else torch.zeros_like(positions)
        edits = dict(zip(self.layer_numbers, self.edits, strict=True))
        with HybridCall(cache, cells, edits, rows, attention).running() as call:
            output = self.run(tokens, places, cache, **given)
        if observe is not None:
            # The last entry is what libraries multiply, without the factor of the logits.
            observe += output.hidden_states
        # Under autocast, keys and values are computed in a narrower dtype than that of the state.
        name, dtype = "keys" if attention is None else "unrotated", self.model.dtype
        layers = keep_cache(cache, calls, keys=name, dtype=dtype, cells=call.states)
        return output[0] * self._logit_scale, LMState(after, layers)

    def _masks(self, calls: Sequence[WindowCall]) -> dict[str, Tensor | None]:
        """Return the masks of a call, by the names that transformers has for kinds of layers.

        Raises:
            UserError: the model's implementation of attention takes no masks.
        """
        implementation = masked_implementation(self.model)
        masks: dict[str, Tensor | None] = {"linear_attention": None}
        for sliding, call in zip(self._sliding, calls, strict=True):
            mask = call.read.mask
            if mask is not None and implementation == "eager":
                mask = added_mask(mask, self.model.dtype)
            masks["full_attention" if sliding is None else "sliding_attention"] = mask
        return masks

    def run(
        self, tokens: Tensor, positions: Tensor, cache: Any, keep: int = 1, **given: Any
    ) -> Any:
        """See `ForeignLM.run`; tokens may be embeddings, and the output has no logits."""
        given |= {str(self._cache_name): cache if self._is_cached else None, "use_cache": False}
        if "position_ids" in self._accepted:  # which some models count wrong themselves
            given["position_ids"] = positions
        given["inputs_embeds" if tokens.is_floating_point() else "input_ids"] = tokens
        return self.model.base_model(**given)

    def own_windows(self) -> list[int | None]:
        """See `ForeignLM.own_windows`."""
        return [window or self._family_window for window in self._sliding]

    @property
    def windows(self) -> list[AttentionWindow]:
        """What the attention of each layer reads."""
        if self.attention is not None:
            return self.attention.windows
        return [AttentionWindow(size) for size in self.own_windows()]
