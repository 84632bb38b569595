"""The gated recurrent unit."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from longrnn.mixers.base import MIXERS
from longrnn.mixers.edits import Update
from longrnn.mixers.init import initialise
from longrnn.mixers.stepwise import SequenceT, StepwiseMixer


class GRUState(NamedTuple):
    """`h`: `(b, d)`, the hidden vector, which is also the output."""

    h: Tensor


@MIXERS.register("gru")
class GRU(StepwiseMixer):
    """Gated recurrent unit (arXiv 1406.1078), in the variant of `torch.nn.GRU`.

    r = σ(W_r x + U_r h), z = σ(W_z x + U_z h), ñ = tanh(W_n x + r ∘ (U_n h + b)),
    h ← (1 − z) ∘ ñ + z ∘ h.

    Args:
        d_input: width of x.
        d_model: width of h.
        init: see `longrnn.mixers.init`: `default`, `orthogonal`, `xavier` or `long_memory`.
    """

    native_cell = "gru"

    def __init__(self, d_input: int, d_model: int, *, init: str = "default") -> None:
        super().__init__(d_input, d_model)
        self.cell = nn.GRU(d_input, d_model, batch_first=True)
        initialise(self, init)

    @torch.no_grad()
    def init_time_scales(self, scales: Tensor) -> bool:
        _, _, bias_ih, bias_hh = self.cell.all_weights[0]
        keep = slice(self.d_model, 2 * self.d_model)
        bias_ih[keep] = (scales - 1).log()  # its sigmoid is 1 − 1 / scale
        bias_hh[keep] = 0
        return True

    def state_like(self) -> GRUState:
        return GRUState(self.vector_like())

    def fused(self, x: SequenceT, state: GRUState) -> tuple[SequenceT, GRUState]:
        y, h = self.cell(x, state.h[None].contiguous())
        return y, GRUState(h[0].to(state.h.dtype))

    def memory(self, state: GRUState) -> Tensor:
        return state.h

    def state_of(self, h: Tensor, memory: Tensor) -> GRUState:
        return GRUState(h)

    def step(
        self, projected: Tensor, state: GRUState
    ) -> tuple[Update, Callable[[Tensor], GRUState]]:
        x_r, x_z, x_n = projected.chunk(3, dim=-1)
        h_r, h_z, h_n = self.recurrent(state.h).chunk(3, dim=-1)
        z = torch.sigmoid(x_z + h_z)
        candidate = torch.tanh(x_n + torch.sigmoid(x_r + h_r) * h_n)
        return Update(add=(1 - z) * candidate, keep=z), GRUState
