"""State normalisation."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from longrnn.mitigations.base import MITIGATIONS, Mitigation
from longrnn.mitigations.values import check_values, of_layer
from longrnn.mixers import Mixer, Update
from longrnn.ops.ssd import SSD, ScanInputs
from longrnn.ops.ssd.rescale import UNLIMITED, rescaled_ssd, scale_of


@MITIGATIONS.register("state_norm")
class StateNorm(Mitigation):
    """A head's state never exceeds a norm: h_t = ĥ_t · min(1, p / ‖ĥ_t‖) (arXiv 2410.07145).

    ĥ_t = a_t h_{t−1} + u_t, Frobenius norm over one head; the cell vector in an LSTM, the hidden
    vector in a GRU or an Elman cell. A state that never reaches p is not changed at all.

    Args:
        threshold: p > 0; a number, a list by layer, or lists by layer and head, null for a head
            to leave alone. `longrnn calibrate` takes it from the norms inside the training length.
        layers: see `Mitigation`.
        heads: see `Mitigation`.
        diagnosis: see `Mitigation`.
    """

    name = "state_norm"

    def __init__(
        self, *, threshold: Any, layers: Any = None, heads: Any = None, diagnosis: Any = None
    ) -> None:
        super().__init__(layers=layers, heads=heads, diagnosis=diagnosis)
        self.threshold = check_values("threshold", threshold, above=0)
        self.limits: list[Tensor] = []

    def prepare(self, layer: int, mixer: Mixer) -> None:
        mask, n_layers = self.masks[layer], len(self.masks)
        limit = of_layer("threshold", self.threshold, layer, n_layers, mask, UNLIMITED)
        self.limits = [*self.limits[:layer], limit.clamp(max=UNLIMITED)]

    def scan(
        self, layer: int, inputs: ScanInputs, state: Tensor, carry: Any, ssd: SSD
    ) -> tuple[Tensor, Tensor, Any]:
        limit = self.limits[layer].to(state.device)
        y, state = rescaled_ssd(inputs, state, limit, ssd)
        return y, state, carry

    def edit_step(
        self, layer: int, before: Tensor, after: Update, carry: Any
    ) -> tuple[Update, Any]:
        memory = after.apply(before)
        # In float64: float32 has no numbers for the scale of a memory of 1e37.
        scale = scale_of(self.limits[layer].to(memory.device), memory, (-1,))
        keep = None if after.keep is None else after.keep * scale
        return Update(add=after.add * scale, keep=keep), carry
