"""Sliding window."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from longrnn.errors import UserError
from longrnn.mitigations.base import MITIGATIONS, Mitigation
from longrnn.mixers import Mixer, ScanningMixer, StepwiseMixer, Update
from longrnn.ops.ssd import SSD, ScanInputs
from longrnn.ops.ssd.window import init_carry, windowed_ssd
from longrnn.ops.window import StepwiseCarry, init_stepwise, slide
from longrnn.state import PyTree


class Heads(NamedTuple):
    """Heads of one layer that have a window, those that have none, and where each went."""

    inside: Tensor
    outside: Tensor
    order: Tensor


@MITIGATIONS.register("sliding_window")
class SlidingWindow(Mitigation):
    """A head's state is that of its last `window` tokens alone (arXiv 2410.07145).

    h_t = Σ_{i = t−r+1 … t} a_{i+1} … a_t u_i, which the paper computes as a difference of two
    states and which is here a sum of what is inside (see `longrnn.ops.ssd.window`). In an LSTM and
    a GRU the same holds for the memory given its gates. Per layer it equals a fresh scan over the
    last r inputs; through depth a token sees about layers × r tokens. The window holds inputs:
    what a state held before the first token is outside of it.

    Args:
        window: r >= 1 tokens, any integer.
        layers: see `Mitigation`.
        heads: see `Mitigation`.
        diagnosis: see `Mitigation`.
    """

    name = "sliding_window"

    def __init__(
        self, *, window: int, layers: Any = None, heads: Any = None, diagnosis: Any = None
    ) -> None:
        super().__init__(layers=layers, heads=heads, diagnosis=diagnosis)
        if window < 1:
            raise UserError(f"window must be at least 1, not {window}")
        self.window = window
        self.mixers: list[Mixer] = []
        self.chosen: list[Heads] = []

    @classmethod
    def undefined(cls, mixer: type[Mixer]) -> str | None:
        if issubclass(mixer, StepwiseMixer) and not mixer.gated:
            return "its state is no sum over past inputs that could be cut off"
        return None

    def prepare(self, layer: int, mixer: Mixer) -> None:
        self.mixers = [*self.mixers[:layer], mixer]
        inside = self.masks[layer].nonzero()[:, 0]
        outside = (~self.masks[layer]).nonzero()[:, 0]
        order = torch.cat([inside, outside]).argsort()
        self.chosen = [*self.chosen[:layer], Heads(inside, outside, order)]

    def init_carry(self, layer: int, batch_size: int) -> PyTree:
        mixer, inside = self.mixers[layer], self.chosen[layer].inside
        if len(inside) == 0:
            return ()
        if isinstance(mixer, StepwiseMixer):
            return init_stepwise(mixer.memory(mixer.init_state(batch_size)), self.window)
        assert isinstance(mixer, ScanningMixer)
        like = mixer.inputs_like()
        state = mixer.memory(mixer.init_state(batch_size))
        if len(self.chosen[layer].outside) == 0:
            return init_carry(like, state, self.window)  # heads share B within a group
        with_time = ScanInputs(*(tensor[None] for tensor in like))
        chosen = ScanInputs(*(tensor[0] for tensor in _take_heads(with_time, inside)))
        return init_carry(chosen, state[:, inside.to(state.device)], self.window)

    def scan(
        self, layer: int, inputs: ScanInputs, state: Tensor, carry: PyTree, ssd: SSD
    ) -> tuple[Tensor, Tensor, PyTree]:
        inside, outside, order = (index.to(state.device) for index in self.chosen[layer])
        if len(inside) == 0:
            y, state = ssd(inputs, state)
            return y, state, carry
        if len(outside) == 0:
            return windowed_ssd(inputs, carry, self.window)
        y_in, state_in, carry = windowed_ssd(_take_heads(inputs, inside), carry, self.window)
        y_out, state_out = ssd(_take_heads(inputs, outside), state[:, outside])
        y = torch.cat([y_in, y_out], dim=2)[:, :, order]
        return y, torch.cat([state_in, state_out], dim=1)[:, order], carry

    def edit_step(
        self, layer: int, before: Tensor, after: Update, carry: PyTree
    ) -> tuple[Update, PyTree]:
        if len(self.chosen[layer].inside) == 0:
            return after, carry
        assert after.keep is not None
        assert isinstance(carry, StepwiseCarry)
        memory, carry = slide(after.keep, after.add, carry)
        # Not keep = 0: a NaN that has left the window would come back as 0 · NaN.
        return Update(add=memory, keep=None), carry


def _take_heads(inputs: ScanInputs, heads: Tensor) -> ScanInputs:
    """Inputs of some heads; where there are several groups, each head gets one of its own."""
    groups = inputs.B.shape[2]
    B, C = inputs.B, inputs.C
    if groups > 1:
        group = heads // (inputs.x.shape[2] // groups)
        B, C = B[:, :, group], C[:, :, group]
    return ScanInputs(inputs.x[:, :, heads], inputs.log_decay[:, :, heads], B, C)
