"""`token_filter`: ignores tokens with short steps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from longrnn.mitigations.base import MITIGATIONS, Mitigation, without_steps
from longrnn.mitigations.values import Constant, Range, per_head
from longrnn.mixers import Edit, Mixer, Steps
from longrnn.state import PyTree

# Below every step: a head with this threshold ignores no token.
NEVER = -1.0


class Filter(Edit):
    """Sets short steps to 0; `threshold` is `(h,)` float64."""

    def __init__(self, threshold: Tensor) -> None:
        self.threshold = Constant(threshold)

    def edit_steps(self, steps: Steps, carry: PyTree) -> tuple[Steps, PyTree]:
        # In the dtype of dt, so that a threshold taken from a step equals this step.
        short = steps.dt <= self.threshold.like(steps.dt)
        # x too, because 0 times an infinite input would be NaN in the state.
        x = torch.where(short[..., None], torch.zeros_like(steps.x), steps.x)
        return steps._replace(x=x, dt=steps.dt.masked_fill(short, 0)), carry


@MITIGATIONS.register("token_filter")
@dataclass(frozen=True, kw_only=True)
class TokenFilter(Mitigation):
    """dt_t := 0 where dt_t is at or below a threshold: such a token does not change the state.

    Meant for global heads, whose retention over the training length exceeds 0.05, with thresholds
    from calibration text (arXiv 2504.16053): `longrnn calibrate` finds both. In a chain the filter
    compares the steps that earlier members return: s · dt after a `scale_delta`, dt before it.
    `scale_decay` and `power_decay` change no step.

    Args:
        threshold: largest dt to ignore, at least 0; a number, a list by layer, or lists by layer
            and head, null for a head to leave unchanged.
        layers: see `Mitigation`.
        heads: see `Mitigation`.
        diagnosis: see `Mitigation`.
    """

    threshold: Any

    name = "token_filter"
    numbers: ClassVar = {"threshold": Range(least=0)}

    @classmethod
    def undefined(cls, mixer: type[Mixer]) -> str | None:
        return without_steps(mixer)

    def bind(self, layer: int, mixer: Mixer, heads: Tensor) -> Edit:
        return Filter(per_head(self.threshold, layer, heads, alone=NEVER))
