"""`forget_more`: multiplies decays and inputs by constants."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from longrnn.mitigations.base import MITIGATIONS, Mitigation, Stage
from longrnn.mitigations.values import Constant, Range, per_head
from longrnn.mixers import Edit, Mixer, StepwiseMixer, Update, UpdateRule
from longrnn.ops.ssd import ScanInputs
from longrnn.state import PyTree


class Multiply(Edit):
    """Multiplies decays and inputs of each head.

    Args:
        decay: `(h,)` float64, in (0, 1].
        scale: `(h,)` float64, the factor of the inputs.
    """

    def __init__(self, decay: Tensor, scale: Tensor) -> None:
        self.log_decay, self.scale = Constant(decay.log()), Constant(scale)
        self._numbers = decay.tolist(), scale.tolist()

    def edit_inputs(self, inputs: ScanInputs, carry: PyTree) -> tuple[ScanInputs, PyTree]:
        log_decay = inputs.log_decay + self.log_decay.like(inputs.log_decay)
        gain = inputs.gain * self.scale.like(inputs.gain)
        return inputs._replace(gain=gain, log_decay=log_decay), carry

    def edit_update(self, update: Update, carry: PyTree) -> tuple[Update, PyTree]:
        assert update.keep is not None
        (decay,), (scale,) = self._numbers
        return Update(add=update.add * scale, keep=update.keep * decay), carry

    def update_rule(self, carry: PyTree) -> UpdateRule | None:
        (decay,), (scale,) = self._numbers
        return UpdateRule(keep=decay, add=scale)


@MITIGATIONS.register("forget_more")
@dataclass(frozen=True, kw_only=True)
class ForgetMore(Mitigation):
    """Multiplies every decay and every input by a constant (arXiv 2410.07145).

    a'_t = m_a a_t and B'_t = m_b B_t; in an LSTM or a GRU, keep' = m_a keep and add' = m_b add.
    The memory is limited to about 1 / (1 − m_a) tokens at any prompt length, at some cost in
    quality within the training length.

    Args:
        decay_scale: m_a, in (0, 1]; a number, a list by layer, or lists by layer and head.
        input_scale: m_b, in (0, 1]; given in the same way.
        layers: see `Mitigation`.
        heads: see `Mitigation`.
        diagnosis: see `Mitigation`.
    """

    decay_scale: Any = 0.9999
    input_scale: Any = 0.75

    name = "forget_more"
    stage = Stage.MULTIPLIERS
    numbers: ClassVar = {
        "decay_scale": Range(above=0, most=1),
        "input_scale": Range(above=0, most=1),
    }

    @classmethod
    def undefined(cls, mixer: type[Mixer]) -> str | None:
        if issubclass(mixer, StepwiseMixer) and not mixer.gated:
            return "its new state is not a gated sum of the old one and an input; use state_norm"
        return super().undefined(mixer)

    def bind(self, layer: int, mixer: Mixer, heads: Tensor) -> Edit:
        return Multiply(
            per_head(self.decay_scale, layer, heads, alone=1.0),
            per_head(self.input_scale, layer, heads, alone=1.0),
        )
