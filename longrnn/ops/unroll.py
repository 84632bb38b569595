"""The Python loop over time that all stepwise cells share."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor

S = TypeVar("S")


def unroll(
    step: Callable[[Tensor, S], S], read: Callable[[S], Tensor], inputs: Tensor, state: S
) -> tuple[Tensor, S]:
    """Applies `step` to each token in turn and computes an output from each new state.

    Args:
        step: maps (token `(b, …)`, state) to the next state.
        read: maps a state to an output `(b, d)`.
        inputs: `(b, t, …)`, t >= 1.
        state: the state before the first token.

    Returns:
        Outputs `(b, t, d)` and the state after the last token.
    """
    outputs = []
    for token in inputs.unbind(1):
        state = step(token, state)
        outputs.append(read(state))
    return torch.stack(outputs, dim=1), state
