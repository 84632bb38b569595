"""`WindowedAttention`: makes the layers of a Hugging Face model attend through `WindowCall`.

All tokens of a call are given position 0, at which a rotary encoding changes nothing, so that
queries, keys and the cache are not rotated. The function that the model would have called computes
the attention, from the queries and keys that `WindowCall` rotates, with its mask.

A model with linear biases (ALiBi), which follow from the places of keys in the cache, attends as in
transformers. It reads one token after another from a cache without the keys between sinks and
window. A model with positions of another kind is refused.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import Tensor, nn
from transformers import cache_utils

from longrnn.errors import UserError
from longrnn.hf.attention_layers import AttentionLayer, attention_layers, reading_by
from longrnn.hf.attention_window import AttentionWindow, WindowCall, window_call
from longrnn.ops.rows import Rows, positions_of
from longrnn.programs import reason_of

# Implementations of attention in transformers that take a mask for each row.
MASKED = ("sdpa", "eager")


class WindowedAttention:
    """The layers of attention of a model, and the window of each.

    Args:
        model: a `ForeignLM`.
        window: of every layer that the architecture gives no smaller one.

    Attributes:
        windows: of each layer of the cache.
        layers: by module of the model.
        counts_keys: whether positions are those of keys in the cache, so that a token can follow
            only when the cache is cut, and layers attend as in transformers.
        is_stateful: whether there are layers of other kinds, whose states transformers computes.

    Raises:
        UserError: a model whose attention cannot be limited.
    """

    def __init__(self, model: Any, window: AttentionWindow) -> None:
        self.model, self.window = model.model, window
        reason = model.positions_reason
        if "chunked_attention" in (getattr(model.config, "layer_types", None) or ()):
            reason = "its attention is limited to chunks"
        if reason is not None:
            raise no_window(model, reason)
        self.windows = [
            AttentionWindow(own) if own and own <= (window.size or own) else window
            for own in model.own_windows()
        ]
        self.counts_keys = counts_keys(model.config)
        self.layers: dict[nn.Module, AttentionLayer] = {}
        if not self.counts_keys:
            try:
                self.layers = attention_layers(model, window.reach if window.size else 2)
            except ValueError as error:
                raise no_window(model, reason_of(error)) from error
            except Exception as error:  # its code fails when transformers gives it no mask
                raise no_window(model, "its attention makes its own masks") from error
        attends = {layer.number for layer in self.layers.values()} or range(len(self.windows))
        if window.size and window not in [self.windows[number] for number in attends]:
            raise no_window(model, f"each layer of attention has a window below {window.size}")
        kinds = cache_utils.LinearAttentionCacheLayerMixin
        caches = model.new_cache().layers
        self.is_stateful = not model.cells and any(isinstance(each, kinds) for each in caches)

    def call(self, before: Tensor, time: int, rows: Rows | None) -> WindowedCall:
        """Return what computes the attention of one call; see `WindowCall`."""
        return WindowedCall(self, before, time, rows)


def counts_keys(config: Any) -> bool:
    """Whether a model has linear biases for positions (ALiBi), which it counts in its cache."""
    nested = getattr(config, "attn_config", None)
    return (
        config.model_type == "bloom"
        or bool(getattr(config, "alibi", False))
        or bool(getattr(nested, "alibi", False))
    )


def no_window(model: Any, reason: str) -> UserError:
    """Return the error for a `ForeignLM` whose attention cannot be limited."""
    return UserError(
        f"this {model.kind} cannot have an attention_window ({reason}): evaluate it without, or "
        "use another model"
    )


def checked_window(model: Any, window: int, sinks: int) -> AttentionWindow:
    """Return the window of a `ForeignLM`.

    Raises:
        UserError: fewer than two tokens, or more than the model was made for.
    """
    largest = getattr(model.config, "max_position_embeddings", None) or window + sinks
    if window < 2 or sinks < 0 or window + sinks > largest:
        raise UserError(
            f"attention_window(window={window}, sinks={sinks}) is not valid for this "
            f"{model.kind}: give a window of at least 2 and together at most {largest:,} tokens"
        )
    return AttentionWindow(window, sinks)


class WindowedCall:
    """The attention of one call of a model: a `Reader`.

    Args:
        attention: of the model.
        before: see `WindowCall`.
        time: likewise.
        rows: likewise.
    """

    def __init__(
        self, attention: WindowedAttention, before: Tensor, time: int, rows: Rows | None
    ) -> None:
        self._attention = attention
        self.after = positions_of(before, time, rows)[1]
        self._implementation = masked_implementation(attention.model)
        calls = {window: window_call(window, before, time, rows) for window in {*attention.windows}}
        self.calls: list[WindowCall] = [calls[window] for window in attention.windows]

    def reading(self) -> AbstractContextManager[None]:
        """A context in which the model attends so."""
        if self._attention.counts_keys:
            return nullcontext()
        return reading_by(self._attention.model, self)

    def attend(self, layer: Any, query: Tensor, key: Tensor, value: Tensor, options: Any) -> Any:
        """See `Reader`."""
        number, rotation = self._attention.layers[layer]
        call, function = self.calls[number], implementation_of(layer, self._implementation)
        if options.get("scaling") is None:
            options["scaling"] = query.shape[-1] ** -0.5

        def attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
            return function(layer, query, key, value, mask, **options)[0]

        return call.attend(query, key, value, rotation, attention), None


def masked_implementation(model: Any) -> str:
    """The implementation of attention of a model, which takes masks.

    Raises:
        UserError: it takes none.
    """
    implementation = model.config._attn_implementation
    if implementation not in MASKED:
        raise UserError(
            f"the attention implementation {implementation} takes no masks, which windows, "
            f"padding and rows of different lengths need: load the model with {MASKED[0]}"
        )
    return implementation


def implementation_of(layer: Any, name: str) -> Callable[..., Any]:
    """The function of transformers that computes the attention of a layer."""
    code = vars(sys.modules[type(layer).__module__])
    return code["ALL_ATTENTION_FUNCTIONS"].get_interface(name, code["eager_attention_forward"])
