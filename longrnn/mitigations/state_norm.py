"""`state_norm`: limits the norm of a head's state."""

import math

from torch import Tensor

from longrnn.cells import Edit
from longrnn.mitigations.base import MITIGATIONS, Mitigation
from longrnn.mitigations.values import AboveZero, per_head


@MITIGATIONS.register("state_norm")
class StateNorm(Mitigation):
    """Limits the norm of a head's state: h_t = ĥ_t · min(1, threshold / ‖ĥ_t‖) (arXiv 2410.07145).

    Here ĥ_t = a_t h_{t−1} + u_t, with the Frobenius norm over one head; in an LSTM it is the cell
    vector, in a GRU or an Elman cell the hidden vector. A state below the threshold is unchanged.

    Args:
        threshold: above 0; a number, a list by layer, or lists by layer and head, null for a head
            to leave unchanged. `longrnn calibrate` takes it from norms within the training length.
        layers: see `Mitigation`.
        heads: see `Mitigation`.
        diagnosis: see `Mitigation`.
    """

    threshold: AboveZero

    def bind(self, layer: int, heads: Tensor) -> Edit:
        return Edit(limit=per_head(self.threshold, layer, heads, alone=math.inf))
