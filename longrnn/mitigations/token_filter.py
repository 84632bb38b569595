"""`token_filter`: ignores tokens with short steps."""

from torch import Tensor

from longrnn.cells import Cell, Edit, StepChange
from longrnn.mitigations.base import MITIGATIONS, Mitigation, without_steps
from longrnn.mitigations.values import AtLeastZero, per_head

# Below every step: a head with this threshold ignores no token.
IGNORES_NOTHING = -1.0


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
