"""Finds how a Hugging Face model must be called so that pieces and forks give what one call gives.

Two rows of twelve tokens are processed in one call without a cache, which defines the right logits,
and then in pieces, in the fastest way first, until one way gives the same logits. Windows of
attention are shortened meanwhile, so that the tokens cross them.
"""

from __future__ import annotations

import itertools
from collections.abc import Container, Iterator
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from longrnn.errors import UserError
from longrnn.files import one_line
from longrnn.models.finite import cause_of_nonfinite
from longrnn.state import PyTree, histories, join, leaves, map_histories, take, tree_map

if TYPE_CHECKING:
    from longrnn.hf.foreign import ForeignLM

# How much the logits of pieces may differ from those of one call, relative to the largest logit.
TOLERANCE = {torch.float64: 1e-8, torch.float32: 1e-4}
NARROW_TOLERANCE = 0.1
# (rows_together, tokens_together), the fastest way first.
TOGETHER = ((True, True), (False, True), (True, False), (False, False))
# Lengths of the pieces into which the twelve tokens are cut.
SPLITS = ((6, 4, 2), (7, 1, 1, 3))
# Windows of attention in a configuration, and what they are for the twelve tokens: masks and caches
# read them at every call.
WINDOWS, SHORT = ("sliding_window", "attention_chunk_size"), 5


@torch.no_grad()
def find_reading(model: ForeignLM) -> str | None:
    """Set how a model is called (`rows_together`, `tokens_together`) and its `like`.

    Returns:
        The reason why the model cannot be called in pieces; None if it can.

    Raises:
        UserError: the logits are not finite.
    """
    tokens = _tokens(model)
    try:
        _, layers = model.call(tokens[:, :6], (), 0, 1)
    except Exception as error:  # of `close_cache`, or of a model that does not support the call
        return one_line(error)
    for name, leaf in leaves(layers):
        if leaf.shape[:1] != (2,):
            return f"its cache has no batch axis first ({name})"
    model.like = _like(layers)
    # Appended keys and values can be checked in a narrow dtype. The error of a recurrent layer that
    # drops part of its state may be smaller than the rounding of a narrow dtype.
    appended = histories(layers) == {name for name, _ in leaves(layers)}
    exact = nullcontext() if appended else _in_float32(model.model)
    with exact, _narrow_windows(model.config):
        return _find_way(model, tokens)


@torch.no_grad()
def find_dtypes(model: ForeignLM) -> None:
    """Set `like` again after the weights were cast: the dtypes of a state follow theirs."""
    model.like = _like(model.call(_tokens(model), (), 0, 1)[1])


def _tokens(model: ForeignLM) -> Tensor:
    return torch.arange(1, 25, device=model.model.device).view(2, 12) % model.vocab_size


def _like(layers: PyTree) -> PyTree:
    """Return `ForeignLM.like` from the layers of any state."""
    rows = tree_map(lambda leaf: leaf[0].to("meta"), layers)
    return map_histories(lambda entries: entries[..., :0, :], rows)


def _find_way(model: ForeignLM, tokens: Tensor) -> str | None:
    """Continue `find_reading` for a model that could process six tokens."""
    try:
        whole = model.model(input_ids=tokens, use_cache=False).logits
    except Exception as error:  # likewise
        return one_line(error)
    if not whole.isfinite().all():
        raise UserError(
            f"this {model.kind} gives logits that are not finite in {whole.dtype}: "
            f"{cause_of_nonfinite(model)}"
        )
    tolerance = TOLERANCE.get(whole.dtype, NARROW_TOLERANCE)
    if histories(model.like) != {name for name, _ in leaves(model.like)}:
        # transformers computes most recurrences in float32, whatever the dtype of the weights.
        tolerance = max(tolerance, TOLERANCE[torch.float32])
    reason = None
    for model.rows_together, model.tokens_together in TOGETHER:
        try:
            off = max(_difference(model, tokens, whole, sizes) for sizes in SPLITS)
        except Exception as error:  # likewise
            reason = reason or one_line(error)
            continue
        if off <= tolerance:
            return None
        reason = reason or f"in pieces its logits differ by {off:.1e} of the largest"
    return reason


def _difference(model: ForeignLM, tokens: Tensor, whole: Tensor, sizes: tuple[int, ...]) -> float:
    """Return how far the logits of pieces are from `whole`, relative to its largest entry."""
    state, rows = model.init_state(len(tokens)), []
    for piece in tokens.split(list(sizes), dim=1):
        position = int(state.position[0])
        outputs = [
            model.read(piece[group], take(state, group), position, piece.shape[1])
            for group in ([[0, 1]] if model.rows_together else [[0], [1]])
        ]
        rows.append(torch.cat([output.logits for output in outputs]))
        state = join([output.state for output in outputs])
        # Process another text in between, which would overwrite any state outside of the cache.
        model.call(tokens.flip(0, 1)[:, :4], (), 0, 1)
    # The clamp avoids 0 / 0 for a model whose head is zero.
    scale = whole.abs().max().clamp(min=torch.finfo(whole.dtype).tiny)
    return float((torch.cat(rows, 1) - whole).abs().max() / scale)


@contextmanager
def _narrow_windows(config: Any) -> Iterator[None]:
    """Make the windows of attention so short that the probe crosses them."""
    windows = {name: getattr(config, name, None) for name in WINDOWS}
    long = {name: size for name, size in windows.items() if isinstance(size, int) and size > SHORT}
    for name in long:
        setattr(config, name, SHORT)
    try:
        yield
    finally:
        for name, size in long.items():
            setattr(config, name, size)


@contextmanager
def _in_float32(model: PreTrainedModel) -> Iterator[None]:
    """Compute in float32: narrower weights are widened, those of a layer only while it runs."""
    kinds = model._no_split_modules or ()
    layers = [module for module in model.modules() if type(module).__name__ in kinds]
    inside = {id(tensor) for layer in layers for tensor in _tensors(layer)}
    stored: dict[nn.Module, list[tuple[Tensor, Tensor]]] = {}

    def widen(module: nn.Module, *_: Any, without: Container[int] = ()) -> None:
        known = {id(tensor): tensor for tensor in _tensors(module) if id(tensor) not in without}
        narrow = [t for t in known.values() if t.is_floating_point() and t.itemsize < 4]
        stored[module] = [(tensor, tensor.data) for tensor in narrow]
        for tensor in narrow:
            tensor.data = tensor.data.float()

    def restore(module: nn.Module, *_: Any) -> None:
        for tensor, data in stored.pop(module, []):
            tensor.data = data

    hooks = [layer.register_forward_pre_hook(widen) for layer in layers]
    hooks += [layer.register_forward_hook(restore, always_call=True) for layer in layers]
    widen(model, without=inside)
    try:
        yield
    finally:
        restore(model)
        for hook in hooks:
            hook.remove()


def _tensors(module: nn.Module) -> Iterator[Tensor]:
    return itertools.chain(module.parameters(), module.buffers())
