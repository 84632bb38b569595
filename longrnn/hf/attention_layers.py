"""Finds the layers of attention of a Hugging Face model, and how each rotates queries and keys.

A Hugging Face model looks its attention up by the name in its configuration. During a call that
name is the one of `_attend`, which leaves the computation to a `Reader`.

The rotation of a layer is found by calling the model at several positions: one of the rotations
with frequencies of the model must give the queries there.
"""

import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from longrnn.hf.attention_window import Rotation
from longrnn.hf.cache import UncutCache

# The name of `_attend` in configurations.
NAME = "longrnn"
# The largest error of a rotation, relative to the largest query, by bytes of a weight.
TOLERANCE = {8: 1e-3, 4: 1e-3, 2: 0.03}


class Reader(Protocol):
    """Computes the attention of one call of a model."""

    def attend(self, layer: Any, query: Tensor, key: Tensor, value: Tensor, options: Any) -> Any:
        """Return the outputs `(b, t, h, d)` and None; `options` are those of the layer's call."""
        ...


_reader: ContextVar[Reader] = ContextVar("reader")


def _attend(
    layer: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **options: Any,
) -> Any:
    if attention_mask is not None:
        raise ValueError("its attention makes its own masks")
    return _reader.get().attend(layer, query, key, value, options)


AttentionInterface.register(NAME, _attend)


@contextmanager
def reading_by(model: Any, reader: Reader) -> Iterator[None]:
    """A context in which `reader` computes the attention of a model."""
    implementation, token = model.config._attn_implementation, _reader.set(reader)
    model.config._attn_implementation = NAME
    try:
        yield
    finally:
        model.config._attn_implementation = implementation
        _reader.reset(token)


class AttentionLayer(NamedTuple):
    """One layer of attention.

    Attributes:
        number: of its cache.
        rotation: of its queries and keys; None for none.
    """

    number: int
    rotation: Rotation | None


class _Recording:
    """A `Reader` that records the queries of each layer, and returns zeros.

    Args:
        cache: that the model is called with.
    """

    def __init__(self, cache: UncutCache) -> None:
        self.cache = cache
        self.queries: dict[Any, Tensor] = {}
        self.numbers: dict[Any, int] = {}

    def attend(self, layer: Any, query: Tensor, key: Tensor, value: Tensor, options: Any) -> Any:
        """See `Reader`."""
        self.queries[layer] = query
        # A layer that has no cache of its own reads the keys of another one.
        shared = [i for i, each in enumerate(self.cache.layers) if getattr(each, "keys", 0) is key]
        self.numbers[layer] = shared[0] if shared else self.cache.latest
        batch, heads, time, _ = query.shape
        return value.new_zeros(batch, time, heads, value.shape[-1]), None


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
    positions = torch.tensor([0, 1, 7, reach], device=device)
    tokens = torch.arange(3, device=device).expand(len(positions), -1)
    recording = _Recording(cache)
    with reading_by(model.model, recording):
        model.run(tokens, positions[:, None].expand_as(tokens), cache)
    if not recording.queries:
        raise ValueError("it has no attention that can be given a mask")
    candidates = functools.cache(lambda width: list(_candidates(model.model, width)))
    return {
        layer: AttentionLayer(
            recording.numbers[layer], _rotation(query, positions, candidates(query.shape[-1]))
        )
        for layer, query in recording.queries.items()
    }


def _rotation(query: Tensor, positions: Tensor, candidates: Sequence[Rotation]) -> Rotation | None:
    """The rotation that explains queries `(b, h, t, d)` at one position per row; 0 is the first.

    Raises:
        ValueError: none of the candidates does, nor the absence of one.
    """
    tolerance, query = TOLERANCE[query.dtype.itemsize], query.double()
    scale = query.abs().max()

    def error(rotation: Rotation | None) -> float:
        found = query[:1]
        if rotation is not None:
            found = rotation.apply(found, rotation.tables(positions[:, None], torch.float64))
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
        for pairing in (halves, dimensions.view(pairs, 2)):
            for first in {0, width - 2 * pairs}:
                for direction in (1.0, -1.0):
                    yield _of_pairs(buffer.double(), pairing + first, width, direction)


def _of_pairs(frequencies: Tensor, pairs: Tensor, width: int, direction: float) -> Rotation:
    """The rotation of pairs of dimensions `(n, 2)`."""
    left, right = pairs.T
    frequency = frequencies.new_zeros(width)
    partner, sign = torch.arange(width, device=pairs.device), torch.zeros_like(frequency)
    frequency[left] = frequency[right] = frequencies
    partner[left], partner[right] = right, left
    sign[left], sign[right] = -direction, direction
    half = width // 2
    is_rolled = torch.equal(partner, torch.arange(width, device=partner.device).roll(half))
    return Rotation(frequency, partner, sign, half if is_rolled else None)
