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

from longrnn.errors import UserError
from longrnn.files import one_line
from longrnn.state import PyTree, histories, join, leaves, map_histories, take, tree_map

if TYPE_CHECKING:
    from longrnn.hf.adapter import HFLanguageModel

# How much the logits of pieces may differ from those of one call, relative to the largest logit.
TOLERANCE = {torch.float64: 1e-8, torch.float32: 1e-4}
NARROW_TOLERANCE = 0.1
# Dtypes of weights that `aminmax` reads.
ORDERED = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
# (rows_together, tokens_together), the fastest way first.
TOGETHER = ((True, True), (False, True), (True, False), (False, False))
# Lengths of the pieces into which the twelve tokens are cut.
SPLITS = ((6, 4, 2), (7, 1, 1, 3))
# Windows of attention in a configuration, and what they are for the twelve tokens: masks and caches
# read them at every call.
WINDOWS, SHORT = ("sliding_window", "attention_chunk_size"), 5


@torch.no_grad()
def refuse_nonfinite_weights(model: HFLanguageModel) -> None:
    """Refuse a model with NaN or infinity in a weight, which short texts need not show.

    One pass over the weights, 2 to 3 percent of the time of loading. Not read are weights on the
    meta device, which are loaded when they are used, those of dtypes without a minimum, and those
    of other types of tensors, as quantised ones are, which need not know these operations.

    Raises:
        UserError: names the first such weight.
    """
    names, bounds = [], []
    for name, weight in model.model.named_parameters():
        is_plain = type(weight) is nn.Parameter and weight.dtype in ORDERED
        if is_plain and weight.device.type != "meta" and weight.numel():
            names.append(name)
            bounds.append(torch.stack(weight.detach().aminmax()).isfinite().all())
    for name, finite in zip(names, bounds, strict=True):
        if not finite:
            weight = model.model.get_parameter(name)
            overflows = weight.dtype.itemsize < 4 and not bool(weight.isnan().any())
            wide = ", or load it with dtype float32" if overflows else ""
            raise UserError(
                f"the weight {name} of this {model.kind} has NaN or infinite values: copy the "
                f"checkpoint again{wide}"
            )


@torch.no_grad()
def find_reading(model: HFLanguageModel) -> str | None:
    """Set how a model is called (`rows_together`, `tokens_together`, `gives_positions`, `like`).

    Returns:
        The reason why the model cannot be called in pieces; None if it can.

    Raises:
        UserError: the logits are not finite.
    """
    tokens = _tokens(model)
    try:
        layers = _first_layers(model, tokens[:, :6])
    except Exception as error:  # NotForkableError, or any error of a model that does not support it
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
def find_dtypes(model: HFLanguageModel) -> None:
    """Set `like` again after the weights were cast: the dtypes of a state follow theirs."""
    model.like = _like(model.call(_tokens(model), (), 0, 1)[1])


def _tokens(model: HFLanguageModel) -> Tensor:
    return torch.arange(1, 25, device=model.model.device).view(2, 12) % model.vocab_size


def _like(layers: PyTree) -> PyTree:
    """Return `HFLanguageModel.like` from the layers of any state."""
    rows = tree_map(lambda leaf: leaf[0].to("meta"), layers)
    return map_histories(lambda entries: entries[..., :0, :], rows)


def _first_layers(model: HFLanguageModel, tokens: Tensor) -> tuple[PyTree, ...]:
    """Return the layers after `tokens`; pass positions to a model that fails without them."""
    try:
        return model.call(tokens, (), 0, 1)[1]
    except Exception:
        if "position_ids" not in model.accepted:
            raise
    model.gives_positions = True
    return model.call(tokens, (), 0, 1)[1]


def _find_way(model: HFLanguageModel, tokens: Tensor) -> str | None:
    """Continue `find_reading` for a model that could process six tokens."""
    try:
        whole = model.model(input_ids=tokens, use_cache=False).logits
    except Exception as error:  # likewise
        return one_line(error)
    if not whole.isfinite().all():
        raise UserError(
            f"this {model.kind} gives logits that are not finite in {whole.dtype}, so its values "
            f"overflow: load it with a wider dtype such as float32, or take another checkpoint"
        )
    tolerance = TOLERANCE.get(whole.dtype, NARROW_TOLERANCE)
    if histories(model.like) != {name for name, _ in leaves(model.like)}:
        # transformers computes most recurrences in float32, whatever the dtype of the weights.
        tolerance = max(tolerance, TOLERANCE[torch.float32])
    reason = None
    counted = (False, True) if "position_ids" in model.accepted else (False,)
    for together, model.gives_positions in itertools.product(TOGETHER, counted):
        model.rows_together, model.tokens_together = together
        try:
            off = max(_difference(model, tokens, whole, sizes) for sizes in SPLITS)
        except Exception as error:  # likewise
            reason = reason or one_line(error)
            continue
        if off <= tolerance:
            return None
        reason = reason or f"in pieces its logits differ by {off:.1e} of the largest"
    return reason


def _difference(
    model: HFLanguageModel, tokens: Tensor, whole: Tensor, sizes: tuple[int, ...]
) -> float:
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
def _in_float32(model: nn.Module) -> Iterator[None]:
    """Compute in float32: narrower weights are widened, those of a layer only while it runs."""
    layers = [layer for one in _outermost_lists(model) for layer in one]
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


def _outermost_lists(module: nn.Module) -> Iterator[nn.ModuleList]:
    """Yield the lists of layers in a model, without lists within their layers."""
    for child in module.children():
        if isinstance(child, nn.ModuleList):
            yield child
        else:
            yield from _outermost_lists(child)


def _tensors(module: nn.Module) -> Iterator[Tensor]:
    return itertools.chain(module.parameters(), module.buffers())
