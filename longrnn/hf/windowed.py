"""`WindowedAttention`: makes the layers of a Hugging Face model attend through `WindowCall`.

A Hugging Face model looks its attention up by the name in its configuration. During a call that
name is the one of `_attend`, which leaves the computation to a function of the call.

All tokens of a call are given position 0, at which a rotary encoding changes nothing, so that
queries, keys and the cache are not rotated. The function that the model would have called computes
the attention, from the queries and keys that `WindowCall` rotates, with its mask. The rotation of a
layer is found by calling the model at several positions: one of the rotations with frequencies of
the model must give the queries there.

A model with linear biases (ALiBi), which follow from the places of keys in the cache, attends as in
transformers. It reads one token after another from a cache without the keys between sinks and
window. A model with positions of another kind is refused.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, cache_utils

from longrnn.errors import UserError
from longrnn.hf.attention_window import AttentionWindow, Rotation, window_calls
from longrnn.ops.rows import Rows, positions_of
from longrnn.programs import reason_of

# The name of `_attend` in configurations.
NAME = "longrnn"
# Implementations of attention in transformers that take a mask for each row.
MASKED = ("sdpa", "eager")
# The largest error of a rotation, relative to the largest query, by bytes of a weight.
TOLERANCE = {8: 1e-3, 4: 1e-3, 2: 0.03}

# Returns the outputs `(b, t, h, d)` for a layer, queries, keys, values and options of its call.
_attention: ContextVar[Callable[..., Tensor]] = ContextVar("attention")


def _attend(
    layer: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **options: Any
) -> tuple[Tensor, None]:
    if attention_mask is not None:
        raise ValueError("its attention makes its own masks")
    return _attention.get()(layer, query, key, value, options), None


AttentionInterface.register(NAME, _attend)


@contextmanager
def attending_by(model: Any, attention: Callable[..., Tensor]) -> Iterator[None]:
    """A context in which a function computes the attention of a model."""
    implementation, token = model.config._attn_implementation, _attention.set(attention)
    model.config._attn_implementation = NAME
    try:
        yield
    finally:
        model.config._attn_implementation = implementation
        _attention.reset(token)


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
        reads_rows: whether rows of different lengths, padded and packed rows go through one call:
            not if layers count keys, or transformers computes recurrent states.

    Raises:
        UserError: a model whose attention cannot be limited.
    """

    def __init__(self, model: Any, window: AttentionWindow) -> None:
        self.model, self.window = model.model, window
        reason = model.table and f"its positions are in a table, {model.table}"
        if not model.has_keys:
            reason = "it has no attention"
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
        is_stateful = not model.cells and any(isinstance(each, kinds) for each in caches)
        self.reads_rows = not (is_stateful or self.counts_keys)

    def call(self, before: Tensor, time: int, rows: Rows | None) -> WindowedCall:
        """Return what computes the attention of one call; see `WindowCall`."""
        return WindowedCall(self, before, time, rows)


class WindowedCall:
    """The attention of one call of a model.

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
        self.calls = window_calls(attention.windows, before, time, rows)

    def reading(self) -> AbstractContextManager[None]:
        """A context in which the model attends so."""
        if self._attention.counts_keys:
            return nullcontext()
        return attending_by(self._attention.model, self.attend)

    def attend(self, layer: Any, query: Tensor, key: Tensor, value: Tensor, options: Any) -> Tensor:
        """Return the outputs `(b, t, h, d)` of a layer; `options` are those of its call."""
        number, rotation = self._attention.layers[layer]
        code = vars(sys.modules[type(layer).__module__])
        function = code["ALL_ATTENTION_FUNCTIONS"].get_interface(
            self._implementation, code["eager_attention_forward"]
        )
        if options.get("scaling") is None:
            options["scaling"] = query.shape[-1] ** -0.5

        def attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
            return function(layer, query, key, value, mask, **options)[0]

        return self.calls[number].attend(query, key, value, rotation, attention)


def counts_keys(config: Any) -> bool:
    """Whether a model has linear biases for positions (ALiBi), which it counts in its cache."""
    parts = (config, getattr(config, "attn_config", None))
    return config.model_type == "bloom" or any(getattr(part, "alibi", False) for part in parts)


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


class AttentionLayer(NamedTuple):
    """One layer of attention.

    Attributes:
        number: of its cache.
        rotation: of its queries and keys; None for none.
    """

    number: int
    rotation: Rotation | None


@torch.no_grad()
def attention_layers(model: Any, reach: int) -> dict[nn.Module, AttentionLayer]:
    """Find the layers of attention of a model, and how each rotates.

    Args:
        model: a `ForeignLM`.
        reach: the largest distance of a token and a key.

    Raises:
        ValueError: there are none, or positions of another kind; the message says so.
    """
    cache, device = model.new_cache(), model.model.device
    # Not 0, at which RecurrentGemma begins a document.
    positions = torch.tensor([1, 2, 8, reach], device=device)
    tokens = torch.arange(3, device=device).expand(len(positions), -1)
    candidates = functools.cache(lambda width: list(_candidates(model.model, width)))
    layers = {}

    def record(layer: Any, query: Tensor, key: Tensor, value: Tensor, _: Any) -> Tensor:
        # A layer that has no cache of its own reads the keys of another one.
        shared = [i for i, each in enumerate(cache.layers) if getattr(each, "keys", 0) is key]
        rotation = _rotation(query, positions, candidates(query.shape[-1]))
        layers[layer] = AttentionLayer(shared[0] if shared else cache.latest, rotation)
        batch, heads, time, _ = query.shape
        return value.new_zeros(batch, time, heads, value.shape[-1])

    with attending_by(model.model, record):
        model.run(tokens, positions[:, None].expand_as(tokens), cache)
    if not layers:
        raise ValueError("it has no attention that can be given a mask")
    return layers


def _rotation(query: Tensor, positions: Tensor, candidates: Sequence[Rotation]) -> Rotation | None:
    """The rotation that explains queries `(b, h, t, d)` at one position per row.

    Raises:
        ValueError: none of the candidates does, nor the absence of one.
    """
    tolerance, query = TOLERANCE[query.dtype.itemsize], query.double()
    scale = query.abs().max()

    def error(rotation: Rotation | None) -> float:
        found = query[:1]
        if rotation is not None:
            turned = (positions - positions[0])[:, None]
            found = rotation.apply(found, *rotation.tables(turned, torch.float64))
        return float((found - query).abs().max() / scale)

    if error(None) <= tolerance / 30:
        return None
    best = min(candidates, key=error, default=None)
    if best is None or not error(best) <= tolerance:
        raise ValueError("its positions are neither rotary nor absent")
    return best


def _candidates(model: Any, width: int) -> Iterator[Rotation]:
    """Every rotation of a head of `width` dimensions by frequencies of the model."""
    for name, buffer in model.named_buffers():
        kind, pairs = name.rpartition(".")[2], buffer.numel()
        if not kind.endswith("inv_freq") or "original" in kind or 2 * pairs > width:
            continue
        dimensions = torch.arange(2 * pairs, device=buffer.device)
        halves = dimensions.view(2, pairs).T
        for pairing in (halves, halves.flip(1), dimensions.view(pairs, 2)):
            for first in {0, width - 2 * pairs}:
                yield _of_pairs(buffer.double(), pairing + first, width)


def _of_pairs(frequencies: Tensor, pairs: Tensor, width: int) -> Rotation:
    """The rotation of pairs of dimensions `(n, 2)`."""
    left, right = pairs.T
    frequency = frequencies.new_zeros(width)
    partner, sign = torch.arange(width, device=pairs.device), torch.zeros_like(frequency)
    frequency[left] = frequency[right] = frequencies
    partner[left], partner[right] = right, left
    sign[left], sign[right] = -1, 1
    half = width // 2
    is_rolled = torch.equal(partner, torch.arange(width, device=partner.device).roll(half))
    return Rotation(frequency, partner, sign, half if is_rolled else None)
