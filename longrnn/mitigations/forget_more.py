"""`forget_more`: multiplies decays and inputs by constants."""

from torch import Tensor

from longrnn.cells import Cell, Edit
from longrnn.mitigations.base import MITIGATIONS, Mitigation
from longrnn.mitigations.values import Factor, per_head


@MITIGATIONS.register("forget_more")
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

    decay_scale: Factor = 0.9999
    input_scale: Factor = 0.75

    @classmethod
    def undefined(cls, cell: type[Cell]) -> str | None:
        if cell.gated:
            return None
        return "its new state is not a gated sum of the old one and an input; use state_norm"

    def bind(self, layer: int, heads: Tensor) -> Edit:
        return Edit(
            keep=per_head(self.decay_scale, layer, heads, alone=1.0),
            add=per_head(self.input_scale, layer, heads, alone=1.0),
        )
