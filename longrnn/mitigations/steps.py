"""Mitigations that change the steps or rates of a state-space cell.

With the step dt and the rate A < 0, a head decays by exp(dt · A) per token and adds dt · x.
"""

from torch import Tensor

from longrnn.cells import Cell, Edit, StepChange
from longrnn.mitigations.base import MITIGATIONS, Mitigation, without_steps
from longrnn.mitigations.values import AtLeastZero, FiniteAboveZero, per_head

# Below every step: a head with this threshold ignores no token.
IGNORES_NOTHING = -1.0


class Scaling(Mitigation):
    """Base of mitigations with one factor per layer and head, in (0, ∞)."""

    scale: FiniteAboveZero = 1.0

    @classmethod
    def undefined(cls, cell: type[Cell]) -> str | None:
        return without_steps(cell)

    def factors(self, layer: int, heads: Tensor) -> Tensor:
        """The factors of the heads of a layer, `(h,)` float64."""
        return per_head(self.scale, layer, heads, alone=1.0)


@MITIGATIONS.register("scale_delta")
class ScaleDelta(Scaling):
    """dt' = s · dt, which scales both the decay and the input of every token.

    In a cell of the delta rule the step is β, the learning rate of its memory, and that of the
    decay: β' = min(s · β, 2) and log α' = s · log α. A β above 2 would let the memory grow.

    MambaExtend (ICLR 2025, LgzRo1RpLS) searches for one factor per layer on calibration text. Its
    selective form divides dt by target length / training length in the heads with the longest
    receptive fields.

    Args:
        scale: s > 0; a number, a list by layer, or lists by layer and head.
        layers: see `Mitigation`.
        heads: see `Mitigation`.
        diagnosis: see `Mitigation`.
    """

    def bind(self, layer: int, heads: Tensor) -> Edit:
        return Edit(steps=(StepChange(step=self.factors(layer, heads)),))


@MITIGATIONS.register("scale_decay")
class ScaleDecay(Scaling):
    """A' = s · A, which changes the decay and not the inputs (arXiv 2509.19633).

    Args:
        scale: s > 0; a number, a list by layer, or lists by layer and head.
        layers: see `Mitigation`.
        heads: see `Mitigation`.
        diagnosis: see `Mitigation`.
    """

    def bind(self, layer: int, heads: Tensor) -> Edit:
        return Edit(steps=(StepChange(log_rate=self.factors(layer, heads).log()[:, None]),))


@MITIGATIONS.register("power_decay")
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

    def bind(self, layer: int, heads: Tensor) -> Edit:
        return Edit(steps=(StepChange(power=self.factors(layer, heads)),))


@MITIGATIONS.register("token_filter")
class TokenFilter(Mitigation):
    """dt_t := 0 where dt_t is at or below a threshold: such a token does not change the state.

    Steps that differ from the threshold by rounding, by 128 units in the last place, count as equal
    to it.

    Meant for global heads, whose retention over the training length exceeds 0.05, with thresholds
    from calibration text (arXiv 2504.16053): `longrnn calibrate` finds both. In a chain the filter
    compares the steps that earlier members return: s · dt after a `scale_delta`, dt before it.
    `scale_decay` and `power_decay` change no step. In a cell of the delta rule dt is β, and such a
    token neither adds nor erases nor decays.

    Args:
        threshold: largest dt to ignore, at least 0; a number, a list by layer, or lists by layer
            and head, null for a head to leave unchanged.
        layers: see `Mitigation`.
        heads: see `Mitigation`.
        diagnosis: see `Mitigation`.
    """

    threshold: AtLeastZero

    @classmethod
    def undefined(cls, cell: type[Cell]) -> str | None:
        if cell.constant_step:
            return "every token has the same step; use forget_more or scale_decay"
        return without_steps(cell)

    def bind(self, layer: int, heads: Tensor) -> Edit:
        threshold = per_head(self.threshold, layer, heads, alone=IGNORES_NOTHING)
        return Edit(steps=(StepChange(threshold=threshold),))
