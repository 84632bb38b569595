"""The vanilla (Elman) recurrent cell."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from longrnn.errors import UserError, nearest
from longrnn.mixers.base import MIXERS
from longrnn.mixers.edits import Update
from longrnn.mixers.init import initialise
from longrnn.mixers.stepwise import SequenceT, StepwiseMixer


def identity(x: Tensor) -> Tensor:
    """Returns x unchanged."""
    return x


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "tanh": torch.tanh,
    "relu": torch.relu,
    "identity": identity,
}


class RNNState(NamedTuple):
    """`h`: `(b, d)`, the hidden vector, which is also the output."""

    h: Tensor


@MIXERS.register("rnn")
class RNN(StepwiseMixer):
    """h_t = φ(W_ih x_t + b_ih + W_hh h_{t−1} + b_hh), φ = tanh or relu (Elman, 1990).

    Args:
        d_input: width of x.
        d_model: width of h.
        nonlinearity: `tanh`, `relu`, or `identity` (a linear network, whose gradients are known).
        init: see `longrnn.mixers.init`: `default`, `orthogonal`, `identity` or `xavier`.
    """

    gated = False

    def __init__(
        self, d_input: int, d_model: int, *, nonlinearity: str = "tanh", init: str = "default"
    ) -> None:
        super().__init__(d_input, d_model)
        if nonlinearity not in ACTIVATIONS:
            remedy = nearest(nonlinearity, ACTIVATIONS)
            raise UserError(f"unknown nonlinearity {nonlinearity!r}: {remedy}")
        # torch.nn has no linear kernel; with `identity` the module only holds the weights.
        self.has_kernel = nonlinearity != "identity"
        kernel = nonlinearity if self.has_kernel else "tanh"
        self.cell = nn.RNN(d_input, d_model, nonlinearity=kernel, batch_first=True)
        self.activation = ACTIVATIONS[nonlinearity]
        self.native_cell = nonlinearity
        initialise(self, init)

    def state_like(self) -> RNNState:
        return RNNState(self.vector_like())

    def fused(self, x: SequenceT, state: RNNState) -> tuple[SequenceT, RNNState]:
        y, h = self.cell(x, state.h[None].contiguous())
        return y, RNNState(h[0].to(state.h.dtype))

    def memory(self, state: RNNState) -> Tensor:
        return state.h

    def state_of(self, h: Tensor, memory: Tensor) -> RNNState:
        return RNNState(h)

    def step(
        self, projected: Tensor, state: RNNState
    ) -> tuple[Update, Callable[[Tensor], RNNState]]:
        h = self.activation(projected + self.recurrent(state.h))
        return Update(add=h, keep=None), RNNState
