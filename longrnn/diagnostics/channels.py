"""Outlier channels of heads, and which channels remain behind the output norm.

A channel of a head is one of the p rows of its p × n state in Mamba-2, and one unit in RNN, GRU and
LSTM. Energy is a sum of squares.

- An outlier channel explodes more than the rest of its head: at more than half of the measurements
  beyond the training length of the same prompt, its root mean square exceeds OUTLIER × the median
  over the channels of its head, and it has grown, relative to its own largest value inside, by
  more than 1.5 × (the margin of `collapse`) the median growth of these channels, and by more than
  1.5. A head whose channels all grow alike has none.
- How concentrated an energy is: the smallest number of channels that hold SHARE of it. This is
  counted for the state of every head, at the training length and at the end.
- The output of a mixer is measured by channel behind its norm, which keeps the energy of a token
  nearly constant: what some channels gain there, the others lose. Shares are of the mean energy of
  all tokens inside the training length, and of all tokens beyond it.

Outlier channels and their effect behind the output norm are described in arXiv 2410.07145; the
thresholds are ours.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import NamedTuple

import torch
from torch import Tensor

from longrnn.diagnostics.collapse import MARGIN
from longrnn.diagnostics.record import ChannelStatistics

OUTLIER = 3.0
SHARE = 0.9
OUTLIER_CRITERION = (
    "A channel of a head is an outlier where, at more than half of the readings beyond the "
    "training length of the same prompt, the root mean square of its entries exceeds "
    f"{OUTLIER:g} × the median over the channels of the head, and its growth over its own largest "
    f"value inside the training length exceeds {1 + MARGIN:g} × the median growth of these "
    f"channels, or {1 + MARGIN:g} where the median is below 1."
)


class Channels(NamedTuple):
    """Statistics by channel, each `(layers, prompts, heads, p)`.

    Attributes:
        outlier: whether it is an outlier channel, bool.
        rms_trained: root mean square of its entries at the training length.
        rms_end: the same at the end.
        largest_trained: largest absolute value of its entries at the training length.
        largest_end: the same at the end.
        output_inside: mean square of the output over the tokens inside the training length.
        output_beyond: the same over the tokens beyond it.
    """

    outlier: Tensor
    rms_trained: Tensor
    rms_end: Tensor
    largest_trained: Tensor
    largest_end: Tensor
    output_inside: Tensor
    output_beyond: Tensor

    def holding_trained(self) -> Tensor:
        """Channels that hold SHARE of the energy of a head's state at the training length."""
        return holding(self.rms_trained.square())

    def holding_end(self) -> Tensor:
        """Channels that hold SHARE of the energy of a head's state at the end."""
        return holding(self.rms_end.square())

    def shares_inside(self) -> Tensor:
        """Shares of the layer's output energy inside the training length; sum 1 per layer."""
        return _shares(self.output_inside)

    def shares_beyond(self) -> Tensor:
        """Shares of the layer's output energy beyond the training length; sum 1 per layer."""
        return _shares(self.output_beyond)

    def output_changes(self) -> list[OutputChange]:
        """Return the change of every layer and prompt, the largest first."""
        inside, beyond = self.shares_inside(), self.shares_beyond()
        heads_inside, heads_beyond = inside.sum(-1), beyond.sum(-1)
        several = inside.shape[2] > 1
        difference = heads_beyond - heads_inside if several else (beyond - inside)[:, :, 0]
        # Shares that are not finite say nothing about where the energy is.
        moved = (difference.abs().sum(-1) / 2).nan_to_num(0.0)
        changes = []
        for layer, prompt in product(*map(range, moved.shape)):
            before, after = heads_inside[layer, prompt], heads_beyond[layer, prompt]
            change = OutputChange(
                layer,
                prompt,
                float(moved[layer, prompt]),
                (after > (1 + MARGIN) * before).nonzero()[:, 0].tolist(),
                before.tolist(),
                after.tolist(),
            )
            changes.append(change)
        return sorted(changes, key=lambda change: -change.moved)


class OutputChange(NamedTuple):
    """How the energy of one layer's output moves between heads or channels beyond training.

    Attributes:
        layer: index.
        prompt: index.
        moved: share of the energy that moved: the total variation distance between the shares by
            head inside and beyond, or by channel in a cell with one head.
        gaining: heads whose share grows by more than half.
        inside: shares by head inside the training length.
        beyond: shares by head beyond it.
    """

    layer: int
    prompt: int
    moved: float
    gaining: list[int]
    inside: list[float]
    beyond: list[float]


class ChannelDetector:
    """Finds outlier channels, and adds up the energy of the output inside and beyond.

    Memory does not grow with the length.

    Args:
        train_length: in tokens.
    """

    def __init__(self, train_length: int) -> None:
        self.train_length = train_length
        self.position = self.beyond = 0
        self.largest_inside: Tensor | float = 0.0
        self.exceeded: Tensor | int = 0
        self.output_inside: Tensor | float = 0.0
        self.output_beyond: Tensor | float = 0.0
        self.trained: tuple[Tensor, Tensor] | None = None
        self.last: tuple[Tensor, Tensor] | None = None

    def see(self, position: int, layers: Sequence[ChannelStatistics]) -> None:
        """Add the measurements of all layers at one position.

        Positions must ascend, and one of them must be the training length.
        """
        rms = torch.stack([layer.rms for layer in layers])
        energy = torch.stack([layer.energy for layer in layers]) * (position - self.position)
        self.position = position
        self.last = rms, torch.stack([layer.largest for layer in layers])
        if position <= self.train_length:
            self.largest_inside = rms.maximum(torch.as_tensor(self.largest_inside, dtype=rms.dtype))
            self.output_inside = self.output_inside + energy
            self.trained = self.last
            return
        self.output_beyond = self.output_beyond + energy
        self.beyond += 1
        large = rms > OUTLIER * rms.median(-1, keepdim=True).values
        inside = torch.as_tensor(self.largest_inside)
        growth = (rms / inside).nanmedian(-1, keepdim=True).values.clamp(min=1)
        self.exceeded = self.exceeded + (large & (rms > (1 + MARGIN) * growth * inside)).int()

    def result(self) -> Channels:
        """Return the statistics of all channels."""
        assert self.trained is not None, "a measurement inside the training length"
        assert self.last is not None
        (rms_trained, largest_trained), (rms_end, largest_end) = self.trained, self.last
        return Channels(
            outlier=torch.as_tensor(self.exceeded) > self.beyond / 2,
            rms_trained=rms_trained,
            rms_end=rms_end,
            largest_trained=largest_trained,
            largest_end=largest_end,
            output_inside=torch.as_tensor(self.output_inside) / self.train_length,
            output_beyond=torch.as_tensor(self.output_beyond) / (self.position - self.train_length),
        )


def holding(energy: Tensor, share: float = SHARE) -> Tensor:
    """Return the smallest number of channels that hold a share of the energy.

    Args:
        energy: `(…, channels)`, at least 0.
        share: of their sum, above 0 and at most 1.

    Returns:
        `(…)` float64; NaN where the energy is 0 or not finite.
    """
    largest_first = energy.double().sort(-1, descending=True).values
    total = largest_first.sum(-1, keepdim=True)
    # The sum of all channels is at least any share; rounding must not say otherwise.
    short = largest_first.cumsum(-1)[..., :-1] < share * total
    count = 1.0 + short.sum(-1)
    known = (total[..., 0] > 0) & total[..., 0].isfinite()
    return torch.where(known, count, torch.nan)


def top_share(energy: Tensor, fraction: float) -> Tensor:
    """Return the share of the energy in the channels with the most of it.

    Args:
        energy: `(…, channels)`, at least 0.
        fraction: of the channels; their number is rounded, to 1 at least.
    """
    count = max(1, round(fraction * energy.shape[-1]))
    return energy.topk(count, dim=-1).values.sum(-1) / energy.sum(-1)


def _shares(energy: Tensor) -> Tensor:
    return energy / energy.sum((-2, -1), keepdim=True)
