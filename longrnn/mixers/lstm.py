"""The long short-term memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from longrnn.mixers.base import MIXERS
from longrnn.mixers.edits import Update
from longrnn.mixers.init import initialise
from longrnn.mixers.stepwise import SequenceT, StepwiseMixer


class LSTMState(NamedTuple):
    """`h`: `(b, d)`, the hidden vector and output; `c`: `(b, d)`, the cell vector."""

    h: Tensor
    c: Tensor


@MIXERS.register("lstm")
class LSTM(StepwiseMixer):
    """Long short-term memory (Hochreiter and Schmidhuber, 1997) with forget gate.

    c ← f ∘ c + i ∘ g, h ← o ∘ tanh(c), with i, f, o = σ(W x + U h + b), g = tanh(W x + U h + b).

    Args:
        d_input: width of x.
        d_model: width of h and c.
        init: see `longrnn.mixers.init`: `default`, `orthogonal`, `xavier` or `long_memory`.
    """

    # For tensors there is a fused kernel, for packed sequences a loop over tokens.
    packs_on_cpu = False
    native_cell = "lstm"
    native_first = False  # torch's kernel reads the weights once for all rows of a batch

    def __init__(self, d_input: int, d_model: int, *, init: str = "default") -> None:
        super().__init__(d_input, d_model)
        self.cell = nn.LSTM(d_input, d_model, batch_first=True)
        initialise(self, init)

    @torch.no_grad()
    def init_time_scales(self, scales: Tensor) -> bool:
        forget = (scales - 1).log()  # its sigmoid is 1 − 1 / scale
        _, _, bias_ih, bias_hh = self.cell.all_weights[0]
        bias_ih[: 2 * self.d_model] = torch.cat([-forget, forget])
        bias_hh[: 2 * self.d_model] = 0
        return True

    def state_like(self) -> LSTMState:
        return LSTMState(self.vector_like(), self.vector_like())

    def fused(self, x: SequenceT, state: LSTMState) -> tuple[SequenceT, LSTMState]:
        y, (h, c) = self.cell(x, (state.h[None].contiguous(), state.c[None].contiguous()))
        return y, LSTMState(h[0].to(state.h.dtype), c[0].to(state.c.dtype))

    def memory(self, state: LSTMState) -> Tensor:
        return state.c

    def state_of(self, h: Tensor, memory: Tensor) -> LSTMState:
        return LSTMState(h, memory)

    def step(
        self, projected: Tensor, state: LSTMState
    ) -> tuple[Update, Callable[[Tensor], LSTMState]]:
        i, f, g, o = (projected + self.recurrent(state.h)).chunk(4, dim=-1)
        update = Update(add=torch.sigmoid(i) * torch.tanh(g), keep=torch.sigmoid(f))
        return update, lambda c: LSTMState(torch.sigmoid(o) * torch.tanh(c), c)
