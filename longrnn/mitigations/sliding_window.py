"""`sliding_window`: limits the memory of a head to its last tokens."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from longrnn.errors import UserError
from longrnn.mitigations.base import MITIGATIONS, Mitigation, Stage
from longrnn.mitigations.values import Constant
from longrnn.mixers import Edit, Mixer, ScanningMixer, StepwiseMixer, Update, UpdateRule
from longrnn.ops.ssd import SSD, ScanInputs
from longrnn.ops.ssd.window import windowed_ssd
from longrnn.ops.ssd.window_carry import init_carry
from longrnn.ops.window import StepwiseCarry, init_stepwise, slide
from longrnn.state import PyTree
from longrnn.units import TokenCount


class Window(Edit):
    """Limits the memory of some heads to the last `window` tokens.

    Args:
        window: in tokens.
        heads: `(h,)` bool, the heads to limit.
        chunk: tokens per chunk of the carry of a scanning cell; None for the usual number.
    """

    def __init__(self, window: int, heads: Tensor, chunk: int | None = None) -> None:
        self.window, self.chunk = window, chunk
        inside, outside = heads.nonzero()[:, 0], (~heads).nonzero()[:, 0]
        self._n_inside, self._n_outside = len(inside), len(outside)
        self.inside, self.outside = Constant(inside), Constant(outside)
        self.order = Constant(torch.cat([inside, outside]).argsort())

    def init_carry(self, mixer: Mixer, batch_size: int) -> PyTree:
        if self._n_inside == 0:
            return ()
        state = mixer.init_state(batch_size)
        if isinstance(mixer, StepwiseMixer):
            return init_stepwise(mixer.memory(state), self.window)
        assert isinstance(mixer, ScanningMixer)
        like, memory = mixer.inputs_like(), mixer.memory(state)
        if self._n_outside == 0:
            return init_carry(
                like, memory, self.window, self.chunk
            )  # keeps B shared within a group
        with_time = ScanInputs(*(tensor[None] for tensor in like))
        chosen = ScanInputs(*(tensor[0] for tensor in _take_heads(with_time, self.inside.value)))
        inside = memory[:, self.inside.on(memory.device)]
        return init_carry(chosen, inside, self.window, self.chunk)

    @property
    def redefines_recurrence(self) -> bool:
        return self._n_inside > 0

    def scan(
        self, inputs: ScanInputs, state: Tensor, carry: PyTree, ssd: SSD
    ) -> tuple[Tensor, Tensor, PyTree]:
        if self._n_inside == 0:
            return super().scan(inputs, state, carry, ssd)
        if self._n_outside == 0:
            return windowed_ssd(inputs, carry, self.window, ssd)
        inside, outside, order = (
            index.on(state.device) for index in (self.inside, self.outside, self.order)
        )
        chosen = _take_heads(inputs, inside)
        y_in, state_in, carry = windowed_ssd(chosen, carry, self.window, ssd)
        y_out, state_out = ssd(_take_heads(inputs, outside), state[:, outside])
        y = torch.cat([y_in, y_out], dim=2)[:, :, order]
        return y, torch.cat([state_in, state_out], dim=1)[:, order], carry

    def advance(self, memory: Tensor, update: Update, carry: PyTree) -> tuple[Tensor, PyTree]:
        if self._n_inside == 0:
            return super().advance(memory, update, carry)
        assert update.keep is not None
        return slide(update.keep, update.add, carry)

    def update_rule(self, carry: PyTree) -> UpdateRule | None:
        return UpdateRule(window=carry) if self._n_inside else UpdateRule()

    def carry_after(self, carry: PyTree, window: StepwiseCarry | None) -> PyTree:
        return window if self._n_inside else carry


@MITIGATIONS.register("sliding_window")
@dataclass(frozen=True, kw_only=True)
class SlidingWindow(Mitigation):
    """The state of a head depends on its last `window` inputs only (arXiv 2410.07145).

    h_t = Σ_{i = t−w+1 … t} a_{i+1} … a_t u_i. The paper computes it as a difference of two states,
    this implementation as a sum (see `longrnn.ops.ssd.window`). In an LSTM and a GRU the same holds
    for the memory, given its gates. A layer computes the same as a scan over its last w inputs from
    a zero state; a token of the last layer depends on about (number of layers) · w tokens. Memory
    from before the first token, in a given state, is outside the window.

    Args:
        window: w >= 1, in tokens.
        chunk: tokens per chunk of what a scanning cell remembers, at most `window`; by default 64.
            It changes no result beyond rounding. The carry holds one state per chunk of the window:
            longer chunks need less memory, and more time on a CPU.
        layers: see `Mitigation`.
        heads: see `Mitigation`.
        diagnosis: see `Mitigation`.
    """

    window: TokenCount
    chunk: TokenCount | None = None

    name = "sliding_window"
    stage = Stage.SCAN

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.window < 1:
            raise UserError(
                f"window must be at least 1, not {self.window}: set the number of tokens to keep"
            )
        if self.chunk is not None and not 1 <= self.chunk <= self.window:
            raise UserError(
                f"chunk must be from 1 up to the window of {self.window} tokens, not {self.chunk}: "
                "leave it out for chunks of the usual length"
            )

    @classmethod
    def undefined(cls, mixer: type[Mixer]) -> str | None:
        if issubclass(mixer, StepwiseMixer) and not mixer.gated:
            return "its state is not a sum over past inputs; use state_norm"
        return super().undefined(mixer)

    def bind(self, layer: int, mixer: Mixer, heads: Tensor) -> Edit:
        if self.chunk is not None and not isinstance(mixer, ScanningMixer):
            raise UserError(
                f"chunk={self.chunk} cuts the window of a cell that scans, and the cell of layer "
                f"{layer} computes one token after another: leave out chunk"
            )
        return Window(self.window, heads, self.chunk)


def _take_heads(inputs: ScanInputs, heads: Tensor) -> ScanInputs:
    """The inputs of some heads; with several groups, each head gets its own copy of B and C."""
    groups = inputs.B.shape[2]
    B, C = inputs.B, inputs.C
    if groups > 1:
        group = heads // (inputs.x.shape[2] // groups)
        B, C = B[:, :, group], C[:, :, group]
    x, gain, log_decay = (tensor[:, :, heads] for tensor in inputs[:3])
    return ScanInputs(x, gain, log_decay, B, C)
