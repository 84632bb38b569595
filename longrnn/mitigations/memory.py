"""Mitigations that limit the memory of a head: its norm, its length, or what it keeps and adds."""

import math

from torch import Tensor

from longrnn.cells import Cell, Edit
from longrnn.mitigations.base import MITIGATIONS, Mitigation
from longrnn.mitigations.values import AboveZero, Factor, per_head
from longrnn.options import Tokens


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


@MITIGATIONS.register("sliding_window")
class SlidingWindow(Mitigation):
    """The state of a head depends on its last `window` inputs only (arXiv 2410.07145).

    h_t = Σ_{i = t−w+1 … t} a_{i+1} … a_t u_i. The paper computes it as a difference of two states,
    this implementation as a sum (see `longrnn.ops.scan.window`). In an LSTM and a GRU the same
    holds for the memory, given its gates. A layer computes the same as a scan over its last w
    inputs from a zero state; a token of the last layer depends on about (number of layers) · w
    tokens. Memory from before the first token, in a given state, is outside the window.

    The model's state holds the inputs of the last min(w, tokens read) tokens: h p + g n numbers per
    token and layer in the dtype of the weights, and 2 h in float32. For the 130m shape these are
    160 KB per token in float32, so 1.3 GB at w = 8,192, and up to a quarter more while tokens are
    generated. A generated token reads all of them.

    Args:
        window: w >= 1, in tokens.
        layers: see `Mitigation`.
        heads: see `Mitigation`.
        diagnosis: see `Mitigation`.
    """

    window: Tokens

    @classmethod
    def undefined(cls, cell: type[Cell]) -> str | None:
        if not cell.diagonal:
            return (
                "its transitions are matrices, by which a window cannot weight its inputs in a "
                "scan; use forget_more"
            )
        return None if cell.gated else "its state is not a sum over past inputs; use state_norm"

    def bind(self, layer: int, heads: Tensor) -> Edit:
        return Edit(window=self.window, heads=None if bool(heads.all()) else heads)


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
