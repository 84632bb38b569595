"""Mitigations that rescale the steps or the decay rates of a state-space cell.

With dt the step and A < 0 the rate, a head decays by exp(dt · A) and takes in dt · x. Three
different things can be scaled, and they are named apart.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from longrnn.mitigations.base import MITIGATIONS, Mitigation, without_steps
from longrnn.mitigations.values import check_values, of_layer
from longrnn.mixers import Mixer, ScanningMixer
from longrnn.ops.ssd import ScanInputs


class Scaling(Mitigation):
    """One factor per layer and head, in (0, ∞); 1 changes nothing."""

    def __init__(self, scale: Any, layers: Any, heads: Any, diagnosis: Any) -> None:
        super().__init__(layers=layers, heads=heads, diagnosis=diagnosis)
        self.scale = check_values("scale", scale, above=0, below=math.inf)
        self.factors: list[Tensor] = []

    @classmethod
    def undefined(cls, mixer: type[Mixer]) -> str | None:
        return without_steps(mixer)

    def prepare(self, layer: int, mixer: Mixer) -> None:
        scale = of_layer("scale", self.scale, layer, len(self.masks), self.masks[layer], 1.0)
        assert isinstance(mixer, ScanningMixer)
        self.factors = [*self.factors[:layer], self.factor(scale, mixer)]

    def factor(self, scale: Tensor, mixer: ScanningMixer) -> Tensor:
        """What log_decay is multiplied by, `(h,)`."""
        return scale

    def edit_inputs(self, layer: int, inputs: ScanInputs) -> ScanInputs:
        return inputs._replace(
            log_decay=inputs.log_decay * self.factors[layer].to(inputs.log_decay)
        )


@MITIGATIONS.register("scale_delta")
class ScaleDelta(Scaling):
    """dt' = s · dt: every step is longer or shorter, its input with it.

    Constant, per layer, or per head. Factors per layer found by a search on calibration text are
    MambaExtend (ICLR 2025, LgzRo1RpLS); n = target length / training length as divisor on the
    heads with the longest receptive fields is the selective form.

    Args:
        scale: s > 0; a number, a list by layer, or lists by layer and head.
        layers: see `Mitigation`.
        heads: see `Mitigation`.
        diagnosis: see `Mitigation`.
    """

    name = "scale_delta"

    def __init__(
        self, *, scale: Any = 1.0, layers: Any = None, heads: Any = None, diagnosis: Any = None
    ) -> None:
        super().__init__(scale, layers, heads, diagnosis)

    def edit_inputs(self, layer: int, inputs: ScanInputs) -> ScanInputs:
        x = inputs.x * self.factors[layer].to(inputs.x)[:, None]
        return super().edit_inputs(layer, inputs)._replace(x=x)


@MITIGATIONS.register("scale_decay")
class ScaleDecay(Scaling):
    """A' = s · A: memory is shorter or longer, inputs stay (arXiv 2509.19633).

    Args:
        scale: s > 0; a number, a list by layer, or lists by layer and head.
        layers: see `Mitigation`.
        heads: see `Mitigation`.
        diagnosis: see `Mitigation`.
    """

    name = "scale_decay"

    def __init__(
        self, *, scale: Any = 1.0, layers: Any = None, heads: Any = None, diagnosis: Any = None
    ) -> None:
        super().__init__(scale, layers, heads, diagnosis)


@MITIGATIONS.register("power_decay")
class PowerDecay(Scaling):
    """|A|' = |A|^s: slow heads (|A| < 1) become faster or slower against fast ones.

    Not the same as `scale_decay`: a head with |A| = 1 stays, and heads on the two sides of 1 move
    in opposite directions (arXiv 2509.19633).

    Args:
        scale: the exponent s > 0; a number, a list by layer, or lists by layer and head.
        layers: see `Mitigation`.
        heads: see `Mitigation`.
        diagnosis: see `Mitigation`.
    """

    name = "power_decay"

    def __init__(
        self, *, scale: Any = 1.0, layers: Any = None, heads: Any = None, diagnosis: Any = None
    ) -> None:
        super().__init__(scale, layers, heads, diagnosis)

    def factor(self, scale: Tensor, mixer: ScanningMixer) -> Tensor:
        rate = -mixer.rates().detach().double().cpu()
        return torch.pow(rate, scale - 1)
