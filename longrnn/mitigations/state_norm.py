"""`state_norm`: limits the norm of a head's state."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from longrnn.mitigations.base import MITIGATIONS, Mitigation, Stage
from longrnn.mitigations.values import Constant, Range, per_head
from longrnn.mixers import Edit, Mixer, Update, UpdateRule
from longrnn.ops.ssd import SSD, ScanInputs
from longrnn.ops.ssd.rescale import UNLIMITED, rescaled_ssd, scale_of
from longrnn.state import PyTree


class Limit(Edit):
    """Limits the norm of each head's state; `limit` is `(h,)` float64."""

    def __init__(self, limit: Tensor) -> None:
        self.limit = Constant(limit)
        self._limits = bool((limit < UNLIMITED).any())

    @property
    def redefines_recurrence(self) -> bool:
        return self._limits

    def scan(
        self, inputs: ScanInputs, state: Tensor, carry: PyTree, ssd: SSD
    ) -> tuple[Tensor, Tensor, PyTree]:
        y, state = rescaled_ssd(inputs, state, self.limit.on(state.device), ssd)
        return y, state, carry

    def advance(self, memory: Tensor, update: Update, carry: PyTree) -> tuple[Tensor, PyTree]:
        memory = update.apply(memory)
        # In float64, because the scale of a memory of 1e37 underflows float32.
        scale = scale_of(self.limit.on(memory.device), memory, (-1,))
        return (memory * scale).to(memory.dtype), carry

    def update_rule(self, carry: PyTree) -> UpdateRule | None:
        return UpdateRule(limit=float(self.limit.value))


@MITIGATIONS.register("state_norm")
@dataclass(frozen=True, kw_only=True)
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

    threshold: Any

    name = "state_norm"
    stage = Stage.SCAN
    numbers: ClassVar = {"threshold": Range(above=0)}

    def bind(self, layer: int, mixer: Mixer, heads: Tensor) -> Edit:
        limit = per_head(self.threshold, layer, heads, alone=UNLIMITED)
        return Limit(limit.clamp(max=UNLIMITED))
