"""What every implementation of the recurrence takes and returns."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple, Protocol

import torch
from torch import Tensor


class ScanInputs(NamedTuple):
    """Inputs of the recurrence h_t = exp(log_decay_t) h_{t-1} + gain_t x_t B_t^T, y_t = h_t C_t.

    Attributes:
        x: `(b, t, h, p)`.
        gain: `(b, t, h)`, in float32 or float64; for Mamba-2 it is dt.
        log_decay: `(b, t, h)`, at most 0, in float32 or float64; for Mamba-2 it is dt · A. With −∞,
            h_t = gain_t x_t B_t^T whatever h_{t-1} is, if it is finite: a document begins.
        B: `(b, t, g, n)`; head i reads group i // (h / g).
        C: `(b, t, g, n)`.
    """

    x: Tensor
    gain: Tensor
    log_decay: Tensor
    B: Tensor
    C: Tensor

    def slice(self, start: int, stop: int) -> ScanInputs:
        """The inputs of tokens `start` up to `stop`."""
        return ScanInputs(*(tensor[:, start:stop] for tensor in self))

    def tokens(self) -> Iterator[ScanInputs]:
        """The inputs of each token, with t = 1."""
        for token in zip(*(tensor.split(1, dim=1) for tensor in self), strict=True):
            yield ScanInputs(*token)

    def scaled_x(self, dtype: torch.dtype) -> Tensor:
        """gain · x in `dtype`, `(b, t, h, p)`."""
        return self.x.to(dtype) * self.gain.to(dtype)[..., None]

    def per_head(self, groups: Tensor) -> Tensor:
        """`(b, t, h, …)` from B, C or another tensor of shape `(b, t, g, …)`."""
        return groups.repeat_interleave(self.x.shape[2] // groups.shape[2], dim=2)


class SSD(Protocol):
    """An implementation: any t >= 1, any initial state, differentiable in every input."""

    def __call__(self, inputs: ScanInputs, state: Tensor) -> tuple[Tensor, Tensor]:
        """Runs the recurrence.

        Args:
            inputs: see `ScanInputs`.
            state: `(b, h, p, n)`, float32 or float64.

        Returns:
            `y` of shape `(b, t, h, p)` and the final state, both in the state's dtype.
        """
        ...


def decayed(state: Tensor, log_decay: Tensor) -> Tensor:
    """exp(log_decay) · state, and 0 for a log_decay of −∞ even if the state is not finite.

    Args:
        state: `(b, h, p, n)`.
        log_decay: `(b, h)`.
    """
    log_decay = log_decay[..., None, None]
    # Before the product, because the gradient of 0 · NaN is NaN too.
    kept = state.masked_fill(log_decay == -torch.inf, 0)
    return log_decay.exp() * kept
