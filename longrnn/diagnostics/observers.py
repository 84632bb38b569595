"""Observers of a model's tokens: they keep sums and change nothing."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from longrnn.state import PyTree


class OutputMeans:
    """Means over tokens of what a mixer returns: the norm of y, and the energy of every channel."""

    def __init__(self) -> None:
        self.norms: Tensor | float = 0.0
        self.squares: Tensor | float = 0.0
        self.count = 0

    def see_output(self, module: torch.nn.Module, args: Any, output: tuple[Tensor, PyTree]) -> None:
        """A forward hook of the mixer."""
        self.see_tensor(module, args, output[0])

    def see_tensor(self, module: torch.nn.Module, args: Any, output: Tensor) -> None:
        """A forward hook of a layer that returns y alone."""
        norms = output.double().norm(dim=-1)
        self.norms, self.count = self.norms + norms.sum(1), self.count + norms.shape[1]

    def see_input(self, module: torch.nn.Module, args: Any) -> None:
        """A forward pre-hook of the projection whose input are the channels."""
        self.see_channels(args[0])

    def see_channels(self, channels: Tensor) -> None:
        """An observer of `Cell.watch_channels`."""
        self.squares = self.squares + channels.double().square().sum(1)

    def take(self) -> tuple[Tensor, Tensor]:
        """Return the means since the last call, `(b,)` and `(b, channels)`, and reset them."""
        norm = torch.as_tensor(self.norms / self.count).cpu()
        energy = torch.as_tensor(self.squares / self.count).cpu()
        self.norms, self.squares, self.count = 0.0, 0.0, 0
        return norm, energy


class MeanLoss:
    """Mean loss in nats over the predictions of each row."""

    def __init__(self, batch: int) -> None:
        self.sum, self.count = torch.zeros(batch, dtype=torch.float64), 0

    def add(self, logits: Tensor, targets: Tensor) -> None:
        """Add predictions; the logits `(b, t, v)` may be of more tokens than the targets."""
        logits = logits[:, : targets.shape[1]]
        wide = logits.to(torch.promote_types(logits.dtype, torch.float32)).transpose(1, 2)
        nats = F.cross_entropy(wide, targets, reduction="none")
        self.sum = self.sum + nats.double().sum(1).cpu()
        self.count += targets.shape[1]

    def take(self) -> Tensor:
        """Return the means since the last call, `(b,)`, and reset them; NaN without values."""
        mean = self.sum / self.count if self.count else torch.full_like(self.sum, math.nan)
        self.sum, self.count = torch.zeros_like(self.sum), 0
        return mean
