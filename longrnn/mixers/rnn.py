"""The vanilla (Elman) recurrent cell."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from longrnn.errors import UserError
from longrnn.mixers.base import MIXERS, StepwiseMixer, Update


class RNNState(NamedTuple):
    """`h`: `(b, d)`, the hidden vector, which is also the output."""

    h: Tensor


@MIXERS.register("rnn")
class RNN(StepwiseMixer):
    """h_t = φ(W_ih x_t + b_ih + W_hh h_{t−1} + b_hh), φ = tanh or relu (Elman, 1990).

    Args:
        d_input: width of x.
        d_model: width of h.
        nonlinearity: `tanh` or `relu`.
    """

    gated = False

    def __init__(self, d_input: int, d_model: int, *, nonlinearity: str = "tanh") -> None:
        super().__init__(d_input, d_model)
        if nonlinearity not in ("tanh", "relu"):
            raise UserError(f"unknown nonlinearity {nonlinearity!r}: use 'tanh' or 'relu'")
        self.cell = nn.RNN(d_input, d_model, nonlinearity=nonlinearity, batch_first=True)
        self.activation = torch.tanh if nonlinearity == "tanh" else torch.relu

    def state_like(self) -> RNNState:
        return RNNState(self.vector_like())

    def fused(self, x: Tensor, state: RNNState) -> tuple[Tensor, RNNState]:
        y, h = self.cell(x, state.h[None].contiguous())
        return y, RNNState(h[0].to(state.h.dtype))

    def memory(self, state: RNNState) -> Tensor:
        return state.h

    def step(
        self, projected: Tensor, state: RNNState
    ) -> tuple[Update, Callable[[Tensor], RNNState]]:
        h = self.activation(projected + self.recurrent(state.h))
        return Update(add=h, keep=None), RNNState
