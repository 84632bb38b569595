"""What every implementation of the recurrence takes and gives."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from torch import Tensor


class ScanInputs(NamedTuple):
    """Inputs of the recurrence h_t = exp(log_decay_t) h_{t-1} + x_t B_t^T, y_t = h_t C_t.

    Attributes:
        x: `(b, t, h, p)`, already multiplied by dt.
        log_decay: `(b, t, h)`, at most 0, in float32 or float64; for Mamba-2 it is dt · A.
        B: `(b, t, g, n)`; head i reads group i // (h / g).
        C: `(b, t, g, n)`.
    """

    x: Tensor
    log_decay: Tensor
    B: Tensor
    C: Tensor


class SSD(Protocol):
    """One implementation: any t >= 1, any initial state, differentiable in every input."""

    def __call__(self, inputs: ScanInputs, state: Tensor) -> tuple[Tensor, Tensor]:
        """Runs the recurrence.

        Args:
            inputs: see `ScanInputs`.
            state: `(b, h, p, n)`, float32 or float64.

        Returns:
            `y` of shape `(b, t, h, p)` and the final state, both in the state's dtype.
        """
        ...
