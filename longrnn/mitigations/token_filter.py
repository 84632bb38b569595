"""Tokens that a long memory had better not see."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from longrnn.mitigations.base import MITIGATIONS, Mitigation, without_steps
from longrnn.mitigations.values import check_values, of_layer
from longrnn.mixers import Mixer, ScanningMixer
from longrnn.ops.ssd import ScanInputs


@MITIGATIONS.register("token_filter")
class TokenFilter(Mitigation):
    """dt_t := 0 where dt_t is at or below a threshold: such a token neither enters nor fades.

    Meant for the global heads, those whose retention over the training length exceeds 0.05, with
    thresholds from calibration text (arXiv 2504.16053): `longrnn calibrate` finds both.

    Args:
        threshold: of dt, at least 0; a number, a list by layer, or lists by layer and head, null
            for a head to leave alone.
        layers: see `Mitigation`.
        heads: see `Mitigation`.
        diagnosis: see `Mitigation`.
    """

    name = "token_filter"

    def __init__(
        self, *, threshold: Any, layers: Any = None, heads: Any = None, diagnosis: Any = None
    ) -> None:
        super().__init__(layers=layers, heads=heads, diagnosis=diagnosis)
        self.threshold = check_values("threshold", threshold, least=0)
        self.limits: list[Tensor] = []

    @classmethod
    def undefined(cls, mixer: type[Mixer]) -> str | None:
        return without_steps(mixer)

    def prepare(self, layer: int, mixer: Mixer) -> None:
        mask, n_layers = self.masks[layer], len(self.masks)
        # −1: no dt is that small.
        threshold = of_layer("threshold", self.threshold, layer, n_layers, mask, -1.0)
        assert isinstance(mixer, ScanningMixer)
        # In log_decay, which is what the recurrence is given: dt ≤ θ ⇔ log_decay ≥ θ A.
        limit = threshold * mixer.rates().detach().double().cpu()
        self.limits = [*self.limits[:layer], limit]

    def edit_inputs(self, layer: int, inputs: ScanInputs) -> ScanInputs:
        filtered = inputs.log_decay >= self.limits[layer].to(inputs.log_decay)
        return inputs._replace(
            log_decay=inputs.log_decay.masked_fill(filtered, 0),
            x=torch.where(filtered[..., None], torch.zeros_like(inputs.x), inputs.x),
        )
