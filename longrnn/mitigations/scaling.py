"""`scale_delta`, `scale_decay` and `power_decay`: rescale the steps or rates of a state-space cell.

With the step dt and the rate A < 0, a head decays by exp(dt · A) per token and adds dt · x.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from longrnn.mitigations.base import MITIGATIONS, Mitigation, without_steps
from longrnn.mitigations.values import Constant, Range, per_head
from longrnn.mixers import Edit, Mixer, Steps
from longrnn.state import PyTree


class Factors(Edit):
    """One factor per head: `scale`, `(h,)` float64; 1 changes nothing."""

    def __init__(self, scale: Tensor) -> None:
        self.scale = Constant(scale)


@dataclass(frozen=True, kw_only=True)
class Scaling(Mitigation):
    """Base of mitigations with one factor per layer and head, in (0, ∞).

    Attributes:
        edit: the class of the edit that applies the factors.
    """

    scale: Any = 1.0

    numbers: ClassVar = {"scale": Range(above=0, below=math.inf)}
    edit: ClassVar[type[Factors]] = Factors

    @classmethod
    def undefined(cls, mixer: type[Mixer]) -> str | None:
        return without_steps(mixer)

    def bind(self, layer: int, mixer: Mixer, heads: Tensor) -> Edit:
        return self.edit(per_head(self.scale, layer, heads, alone=1.0))


class ScaledSteps(Factors):
    """dt' = s · dt."""

    def edit_steps(self, steps: Steps, carry: PyTree) -> tuple[Steps, PyTree]:
        return steps._replace(dt=steps.dt * self.scale.like(steps.dt)), carry


@MITIGATIONS.register("scale_delta")
@dataclass(frozen=True, kw_only=True)
class ScaleDelta(Scaling):
    """dt' = s · dt, which scales both the decay and the input of every token.

    MambaExtend (ICLR 2025, LgzRo1RpLS) searches for one factor per layer on calibration text. Its
    selective form divides dt by target length / training length in the heads with the longest
    receptive fields.

    Args:
        scale: s > 0; a number, a list by layer, or lists by layer and head.
        layers: see `Mitigation`.
        heads: see `Mitigation`.
        diagnosis: see `Mitigation`.
    """

    name = "scale_delta"
    edit = ScaledSteps


class ScaledRates(Factors):
    """A' = s · A."""

    def edit_steps(self, steps: Steps, carry: PyTree) -> tuple[Steps, PyTree]:
        return steps._replace(A=steps.A * self.scale.like(steps.A)), carry


@MITIGATIONS.register("scale_decay")
@dataclass(frozen=True, kw_only=True)
class ScaleDecay(Scaling):
    """A' = s · A, which changes the decay and not the inputs (arXiv 2509.19633).

    Args:
        scale: s > 0; a number, a list by layer, or lists by layer and head.
        layers: see `Mitigation`.
        heads: see `Mitigation`.
        diagnosis: see `Mitigation`.
    """

    name = "scale_decay"
    edit = ScaledRates


class PoweredRates(Factors):
    """|A|' = |A|^s."""

    def edit_steps(self, steps: Steps, carry: PyTree) -> tuple[Steps, PyTree]:
        # In float64, which is cheap for one number per head, so that s is not rounded.
        power = (-steps.A.double()).pow(self.scale.on(steps.A.device))
        return steps._replace(A=-power.to(steps.A)), carry


@MITIGATIONS.register("power_decay")
@dataclass(frozen=True, kw_only=True)
class PowerDecay(Scaling):
    """|A|' = |A|^s, which spreads or narrows the range of rates (arXiv 2509.19633).

    Unlike with `scale_decay`, heads with |A| = 1 do not change, and rates below and above 1 change
    in opposite directions.

    Args:
        scale: the exponent s > 0; a number, a list by layer, or lists by layer and head.
        layers: see `Mitigation`.
        heads: see `Mitigation`.
        diagnosis: see `Mitigation`.
    """

    name = "power_decay"
    edit = PoweredRates
