"""Refuses logits that are not finite, and finds the first token and layer with NaN or infinity.

The check costs one reduction over results that exist anyway. Only if it fails are the tokens
processed again, with hooks on every module.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor, nn

from longrnn.errors import UserError
from longrnn.models.base import LanguageModel, LMOutput
from longrnn.state import LMState, leaves

# Logits, over all rows and tokens, that one call may hold.
MAX_LOGITS = 2**25


class NonfiniteLogits(NamedTuple):
    """`position`: the first token whose logits are not finite; `module`: the first such module."""

    position: int
    module: str | None


def refuse_nonfinite(
    values: Tensor, model: LanguageModel, tokens: Tensor, state: LMState | None = None
) -> None:
    """Refuses logits that are not finite.

    Args:
        values: logits of `model`, or values computed from them, such as losses.
        model: any language model.
        tokens: `(b, t)`, the tokens that gave the values.
        state: the state before them; None for the empty state.

    Raises:
        UserError: names the first token and layer with NaN or infinity.
    """
    if not bool(values.isfinite().all()):
        explain_nonfinite(model, tokens, state)


def explain_nonfinite(
    model: LanguageModel, tokens: Tensor, state: LMState | None = None
) -> NoReturn:
    """Raises the `UserError` of `refuse_nonfinite` for tokens whose logits are not all finite."""
    reason = find_nonfinite(model, tokens, state)
    if reason is None:
        reason = f"the model's logits are not finite: {_cause(model)}"
    raise UserError(reason)


def refuse_nonfinite_state(
    model: LanguageModel, tokens: Callable[[], Tensor], before: LMState, after: LMState
) -> None:
    """Refuses tokens whose logits are not finite, judged first by the state after them.

    For calls without logits: tokens and logits are computed only if the state is not finite.

    Raises:
        UserError: names the first token and layer with NaN or infinity.
    """
    reason = None if _bad_leaf(after) is None else find_nonfinite(model, tokens(), before)
    if reason is not None:
        raise UserError(reason)


@torch.no_grad()
def find_nonfinite(
    model: LanguageModel, tokens: Tensor, state: LMState | None = None
) -> str | None:
    """Describes where NaN or infinity begins, and what to do; None if all logits are finite."""
    state = model.init_state(len(tokens)) if state is None else state
    found = _search(model, tokens.to(state.position.device), state)
    if found is None:
        return None
    where = "" if found.module is None else f" ({_described(found.module)})"
    place = f"from token {found.position:,} on"
    return f"the model's logits are not finite {place}{where}: {_cause(model)}"


def _search(model: LanguageModel, tokens: Tensor, state: LMState) -> NonfiniteLogits | None:
    """Processes the tokens again, with all logits, up to the first part that is not finite."""
    width = max(1, MAX_LOGITS // max(1, len(tokens) * model.vocab_size))
    module = None
    for start in range(0, tokens.shape[1], width):
        part, first = tokens[:, start : start + width], state.position
        with _recording(model) as names:
            logits, state = model(part, state)
        # A state may overflow long before any logit does.
        module = module or next(iter(names), None) or _bad_leaf(state)
        bad = ~logits.isfinite().all(-1)
        if bool(bad.any()):
            positions = first[:, None] + torch.arange(part.shape[1], device=first.device)
            if module is None and isinstance(model, nn.Module):
                module = "the head"
            return NonfiniteLogits(int(positions[bad].min()), module)
    return None


@contextmanager
def _recording(model: LanguageModel) -> Iterator[list[str]]:
    """Collects the names of modules whose output is not finite, in the order of execution."""
    names: list[str] = []
    handles = []

    def hook(name: str) -> Any:
        def record(module: nn.Module, args: Any, output: Any) -> None:
            # A whole model does not identify a layer.
            if not isinstance(output, LMOutput) and _is_bad(output):
                names.append(name)

        return record

    for name, module in model.named_modules() if isinstance(model, nn.Module) else ():
        if name:
            handles.append(module.register_forward_hook(hook(name)))
    try:
        yield names
    finally:
        for handle in handles:
            handle.remove()


def _is_bad(output: Any) -> bool:
    """Whether an output holds NaN or infinity."""
    return not all(bool(tensor.isfinite().all()) for tensor in floating_tensors(output))


def floating_tensors(output: Any) -> Iterator[Tensor]:
    """The floating-point tensors in the inputs or the output of a module, mappings included."""
    if isinstance(output, Tensor):
        if output.is_floating_point():
            yield output
    elif isinstance(output, dict):
        for part in output.values():
            yield from floating_tensors(part)
    elif isinstance(output, (tuple, list)):
        for part in output:
            yield from floating_tensors(part)


def _bad_leaf(state: LMState) -> str | None:
    """The name of the first leaf of a state that is not finite."""
    found = (name for name, leaf in leaves(state.layers) if _is_bad(leaf))
    return next((f"layers.{name}" for name in found), None)


def _described(module: str) -> str:
    """Where the values start, with the number of the layer if the module's name contains it."""
    number = next((part for part in module.split(".") if part.isdecimal()), None)
    return f"it starts in {module}" if number is None else f"it starts in layer {number}, {module}"


def _cause(model: LanguageModel) -> str:
    """The probable cause, and what to do."""
    weights = model.named_parameters() if isinstance(model, nn.Module) else ()
    for name, weight in weights:
        if not bool(weight.isfinite().all()):
            return f"its weight {name} is not finite; take an earlier checkpoint"
    return (
        "its values overflow; use a wider dtype (CHECKPOINT+float32, or load(dtype=…)), or shorter "
        "texts"
    )
