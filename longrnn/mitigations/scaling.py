"""Mitigations that rescale the steps or the decay rates of a state-space cell.

With dt the step and A < 0 the rate, a head decays by exp(dt · A) and takes in dt · x. Three
different things can be scaled, and they are named apart.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from longrnn.mitigations.base import MITIGATIONS, Mitigation, without_steps
from longrnn.mitigations.values import Range, per_head
from longrnn.mixers import Edit, Mixer, Steps
from longrnn.state import PyTree


class Factors(Edit):
    """One factor per head: `scale`, `(h,)` float64; 1 changes nothing."""

    def __init__(self, scale: Tensor) -> None:
        self.scale = scale


@dataclass(frozen=True, kw_only=True)
class Scaling(Mitigation):
    """One factor per layer and head, in (0, ∞).

    Attributes:
        edit: what is done with the factors.
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
        return steps._replace(dt=steps.dt * self.scale.to(steps.dt)), carry


@MITIGATIONS.register("scale_delta")
@dataclass(frozen=True, kw_only=True)
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
    edit = ScaledSteps


class ScaledRates(Factors):
    """A' = s · A."""

    def edit_steps(self, steps: Steps, carry: PyTree) -> tuple[Steps, PyTree]:
        return steps._replace(A=steps.A * self.scale.to(steps.A)), carry


@MITIGATIONS.register("scale_decay")
@dataclass(frozen=True, kw_only=True)
class ScaleDecay(Scaling):
    """A' = s · A: memory is shorter or longer, inputs stay (arXiv 2509.19633).

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
        # One number per head, so float64 costs nothing, and s keeps its digits.
        power = (-steps.A.double()).pow(self.scale.to(steps.A.device))
        return steps._replace(A=-power.to(steps.A)), carry


@MITIGATIONS.register("power_decay")
@dataclass(frozen=True, kw_only=True)
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
    edit = PoweredRates
