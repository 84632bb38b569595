"""Forget more, remember less."""

from __future__ import annotations

from typing import Any

import torch

from longrnn.mitigations.base import MITIGATIONS, Mitigation
from longrnn.mitigations.values import check_values, of_layer
from longrnn.mixers import Mixer, StepwiseMixer, Update
from longrnn.ops.ssd import ScanInputs


@MITIGATIONS.register("forget_more")
class ForgetMore(Mitigation):
    """Every decay and every input is multiplied by a constant (arXiv 2410.07145).

    a'_t = m_a a_t and B'_t = m_b B_t; in an LSTM or a GRU, keep' = m_a keep and add' = m_b add.
    Nothing is remembered for much longer than 1 / (1 − m_a) tokens, at any prompt length; the
    quality inside the training length pays for it.

    Args:
        decay_scale: m_a, in (0, 1]; a number, a list by layer, or lists by layer and head.
        input_scale: m_b, in (0, 1]; likewise.
        layers: see `Mitigation`.
        heads: see `Mitigation`.
        diagnosis: see `Mitigation`.
    """

    name = "forget_more"

    def __init__(
        self,
        *,
        decay_scale: Any = 0.9999,
        input_scale: Any = 0.75,
        layers: Any = None,
        heads: Any = None,
        diagnosis: Any = None,
    ) -> None:
        super().__init__(layers=layers, heads=heads, diagnosis=diagnosis)
        self.decay_scale = check_values("decay_scale", decay_scale, above=0, most=1)
        self.input_scale = check_values("input_scale", input_scale, above=0, most=1)
        self._scales: list[tuple[torch.Tensor, torch.Tensor]] = []

    @classmethod
    def undefined(cls, mixer: type[Mixer]) -> str | None:
        if issubclass(mixer, StepwiseMixer) and not mixer.gated:
            return "its new state is no gated sum of the old one and an input"
        return None

    def prepare(self, layer: int, mixer: Mixer) -> None:
        mask, n_layers = self.masks[layer], len(self.masks)
        decay = of_layer("decay_scale", self.decay_scale, layer, n_layers, mask, 1.0)
        scale = of_layer("input_scale", self.input_scale, layer, n_layers, mask, 1.0)
        self._scales = [*self._scales[:layer], (decay, scale)]

    def edit_inputs(self, layer: int, inputs: ScanInputs) -> ScanInputs:
        decay, scale = self._scales[layer]
        log_decay = inputs.log_decay + decay.log().to(inputs.log_decay)
        # x instead of B, which several heads share; only their product enters the recurrence.
        x = inputs.x if bool((scale == 1).all()) else inputs.x * scale.to(inputs.x)[:, None]
        return inputs._replace(x=x, log_decay=log_decay)

    def edit_step(
        self, layer: int, before: torch.Tensor, after: Update, carry: Any
    ) -> tuple[Update, Any]:
        decay, scale = (float(value) for value in self._scales[layer])
        assert after.keep is not None
        return Update(add=after.add * scale, keep=after.keep * decay), carry
