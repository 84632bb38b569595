"""Policies that start rows from random states."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import torch
from pydantic import Field
from torch import Tensor

from longrnn.state import LMState, PyTree, leaves, tree_map, unflatten
from longrnn.training.initial_states.base import INITIAL_STATES, Context, InitialState, Share

Momentum = Annotated[float, Field(ge=0, lt=1)]
Deviation = Annotated[float, Field(gt=0, allow_inf_nan=False)]


@INITIAL_STATES.register("fitted_noise")
class FittedNoise(InitialState):
    """Normal noise with the running mean and standard deviation of final states.

    Both are taken for each layer and head of a recurrence's state `(b, h, p, n)`, and for each
    layer and unit of any other vector. Until the first step has ended, rows start from zero.

    Args:
        context: of the run.
        zero_share: share of rows that start from zero.
        momentum: weight of the past when a batch is added to the running moments.
    """

    whole_states = False

    def __init__(
        self, context: Context, *, zero_share: Share = 0.1, momentum: Momentum = 0.99
    ) -> None:
        super().__init__(context, zero_share=zero_share)
        self.momentum = momentum
        # By leaf: running means of x and x², `(2, units)` float64, both too small by `weight`.
        self.moments: dict[str, Tensor] = {}
        self.weight = 0.0

    def after(self, state: LMState, micro: int) -> None:
        found = {name: _moments(leaf.detach()) for name, leaf in leaves(state.layers)}
        flat = torch.cat([pair.flatten() for pair in found.values()])
        flat = self.context.total(flat) / self.context.world_size
        if not bool(flat.isfinite().all()):
            return  # the moments of a failed step are not used
        parts = flat.split([pair.numel() for pair in found.values()])
        for (name, pair), part in zip(found.items(), parts, strict=True):
            before = self.moments.get(name, torch.zeros_like(pair))
            self.moments[name] = before.lerp(part.view_as(pair), 1 - self.momentum)
        self.weight += (1 - self.weight) * (1 - self.momentum)

    def content(self) -> dict[str, Tensor]:
        weight = torch.tensor(self.weight, dtype=torch.float64)
        return {"weight": weight} | {name: pair.cpu() for name, pair in self.moments.items()}

    def restore(self, content: Mapping[str, Tensor]) -> None:
        device = self.context.init_state(1).position.device
        self.moments = {n: pair.to(device) for n, pair in content.items() if n != "weight"}
        self.weight = float(content["weight"])

    def _draw(self, zero: LMState, starts: Tensor, seeds: Sequence[int], micro: int) -> LMState:
        if not self.moments:
            return zero
        drawn = []
        for name, noise in leaves(_noise(zero.layers, seeds)):
            mean, square = self.moments[name] / self.weight
            deviation = (square - mean.square()).clamp(min=0).sqrt()
            mean, deviation = (_spread(values, noise) for values in (mean, deviation))
            drawn.append(noise * deviation + mean)
        return zero._replace(layers=unflatten(zero.layers, drawn))


@INITIAL_STATES.register("random_noise")
class RandomNoise(InitialState):
    """Normal noise of mean 0 and standard deviation `std` in every entry of every state.

    Args:
        context: of the run.
        zero_share: share of rows that start from zero.
        std: the standard deviation.
    """

    whole_states = False

    def __init__(self, context: Context, *, zero_share: Share = 0.1, std: Deviation = 0.1) -> None:
        super().__init__(context, zero_share=zero_share)
        self.std = std

    def _draw(self, zero: LMState, starts: Tensor, seeds: Sequence[int], micro: int) -> LMState:
        layers = tree_map(lambda leaf: self.std * leaf, _noise(zero.layers, seeds))
        return zero._replace(layers=layers)


def _generator(seed: int, device: torch.device | str = "cpu") -> torch.Generator:
    return torch.Generator(device).manual_seed(seed)


def _noise(like: PyTree, seeds: Sequence[int]) -> PyTree:
    """Standard normal entries in the shape of `like`, each row from its own seed."""

    device = next(leaf for _, leaf in leaves(like)).device

    def row(seed: int) -> PyTree:
        how: dict[str, Any] = {"generator": _generator(seed, device), "device": device}
        return tree_map(lambda leaf: torch.randn(leaf.shape[1:], dtype=leaf.dtype, **how), like)

    rows = [row(seed) for seed in seeds]
    return tree_map(lambda *drawn: torch.stack(drawn), *rows)


def _moments(leaf: Tensor) -> Tensor:
    """Means of x and x² for each head of `(b, h, p, n)`, or unit of `(…, d)`: `(2, units)`."""
    kept = 1 if leaf.ndim == 4 else leaf.ndim - 1
    others = [axis for axis in range(leaf.ndim) if axis != kept]
    wide = leaf.double()
    return torch.stack([wide.mean(others), wide.square().mean(others)])


def _spread(values: Tensor, like: Tensor) -> Tensor:
    """`(units,)` reshaped to broadcast against `like`; undoes the reduction of `_moments`."""
    return values.view((-1, 1, 1) if like.ndim == 4 else (-1,)).to(like.dtype)
