"""Finds where a loss or gradient stops being finite.

A normal step only checks that its loss and gradient norm are finite. If one is not, its
micro-batches run again with hooks on every module.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from longrnn.data import Batch
from longrnn.state import LMState
from longrnn.training.objective import Objective

MODEL = "model"  # what `Objective` calls the model
LARGEST_NORM = math.sqrt(torch.finfo(torch.float32).max)  # its square is still finite


@dataclass
class OutputSize:
    """Size of the outputs of one module over all its calls: RMS and largest magnitude."""

    squares: float = 0.0
    count: int = 0
    largest: float = 0.0

    def add(self, values: Tensor) -> None:
        wide = values.detach().double()
        self.squares += float(wide.square().sum())
        self.count += wide.numel()
        worst = float(wide.abs().max()) if wide.numel() else 0.0
        self.largest = worst if math.isnan(worst) else max(self.largest, worst)

    @property
    def rms(self) -> float:
        return math.sqrt(self.squares / max(self.count, 1))


@dataclass
class Examination:
    """What one micro-batch computes, forward and backward.

    Attributes:
        loss: its loss.
        finite_rows: `(b,)` bool, rows whose values were all finite in the forward pass.
        layer: where the first value that is not finite came from, in order of execution; None if
            all are finite.
        parameter: the first parameter whose gradient is not finite; if all are and only their
            norm overflows, the one with the largest gradient; None otherwise.
        sizes: output sizes by module, in order of execution.
        gradients: gradient norms by parameter.
    """

    loss: float
    finite_rows: Tensor
    layer: str | None = None
    parameter: str | None = None
    sizes: dict[str, OutputSize] = field(default_factory=dict)
    gradients: dict[str, float] = field(default_factory=dict)

    @property
    def where(self) -> str | None:
        """What is not finite and where it begins; None where all is finite."""
        if self.layer is not None:
            first = f"the first value that is not finite is {self.layer}"
            return f"the loss is {self.loss:.4g}, and {first}"
        if self.parameter is not None:
            norm = self.gradients[self.parameter]
            which = (
                f"the norm of the gradient overflows, most in {self.parameter} ({norm:.4g})"
                if math.isfinite(norm)
                else f"the first gradient that is not finite is that of {self.parameter}"
            )
            return f"the loss is {self.loss:.4g}, and {which}"
        return None


def examine(
    objective: Objective,
    segments: Sequence[Batch],
    state: LMState,
    precision: AbstractContextManager[Any],
) -> Examination:
    """Runs a micro-batch with hooks on every module; weights and gradients stay unchanged.

    Args:
        objective: not wrapped for several devices.
        segments: the segments of the micro-batch.
        state: its initial state.
        precision: the autocast context of the forward pass.
    """
    seen = Examination(math.nan, torch.ones(len(segments[0].tokens), dtype=torch.bool))
    parameters = {n: p for n, p in objective.named_parameters() if p.requires_grad}
    for name, weight in objective.named_parameters():
        if seen.layer is None and not weight.isfinite().all():
            seen.layer = f"the weight {_short(name)}"
    _record_nonfinite(seen, "in the initial state", state.layers)
    handles = [h for name, module in objective.named_modules() for h in _hooks(seen, name, module)]
    try:
        with precision:
            output = objective(segments, state)
    finally:
        for handle in handles:
            handle.remove()
    seen.loss = float(output.loss.detach())
    gradients = torch.autograd.grad(output.loss, list(parameters.values()), allow_unused=True)
    for name, gradient in zip(parameters, gradients, strict=True):
        if gradient is None:
            continue
        seen.gradients[_short(name)] = float(gradient.double().norm())
        if seen.parameter is None and not gradient.isfinite().all():
            seen.parameter = _short(name)
    if seen.parameter is None and math.hypot(*seen.gradients.values()) > LARGEST_NORM:
        seen.parameter = max(seen.gradients, key=lambda name: seen.gradients[name])
    return seen


def _record_nonfinite(seen: Examination, label: str, tree: Any) -> None:
    """Records whether values in `tree` are not finite, and in which rows."""
    for values in floating_tensors(tree):
        finite = values.isfinite()
        if values.ndim and len(values) == len(seen.finite_rows):
            seen.finite_rows &= finite.reshape(len(finite), -1).all(1).cpu()
        if seen.layer is None and not finite.all():
            seen.layer = label


def _hooks(seen: Examination, name: str, module: nn.Module) -> Iterator[Any]:
    """Adds hooks to a module. An input that is not finite was made inside the enclosing module."""
    parent, _, _ = name.rpartition(".")
    after = f"in the output of {_short(name)}" if name else "the loss itself"

    def entered(module: nn.Module, inputs: Any) -> None:
        _record_nonfinite(seen, f"made inside {_short(parent)}", inputs)

    def left(module: nn.Module, inputs: Any, output: Any) -> None:
        _record_nonfinite(seen, after, output)
        first = next(floating_tensors(output), None)
        if first is not None and name:
            seen.sizes.setdefault(_short(name), OutputSize()).add(first)

    yield module.register_forward_pre_hook(entered)
    yield module.register_forward_hook(left)


def _short(name: str) -> str:
    """The name of a parameter or module without the prefix of `Objective`."""
    return name.removeprefix(f"{MODEL}.")


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
