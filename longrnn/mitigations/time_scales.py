"""`time_scales`: changes the weights that determine how long each head remembers, and what."""

from collections.abc import Mapping
from typing import Annotated, Any

import torch
from pydantic import BeforeValidator, model_validator
from torch import Tensor

from longrnn.cells import Cell, Edit
from longrnn.errors import UserError
from longrnn.mitigations.additions import digest_of, read_additions
from longrnn.mitigations.base import MITIGATIONS, Calibration, Mitigation
from longrnn.mitigations.values import Finite


@MITIGATIONS.register("time_scales")
class TimeScales(Mitigation):
    """log |A|' = log |A| + rate, and dt' = softplus(… + dt_bias + bias), by head.

    In an LSTM or a GRU, `bias` is added to the bias of the forget gate (f, or z): the larger, the
    longer it remembers. `weights` has additions to the weights that make steps and gates from
    tokens (`Cell.step_weights`), so that a head can remember some tokens and ignore others. A
    change of weights alone costs nothing once `longrnn convert` has folded it into them. `longrnn
    calibrate --method fit` finds all of them by gradients.

    Args:
        rate: a number, a list by layer, or lists by layer and head; 0 changes nothing.
        bias: likewise. A head may have a list by key or unit in the place of a number.
        weights: path of the file of additions that the calibration wrote; of all heads.
        sha256: of that file; by default of what it holds now.
        layers: see `Mitigation`.
        heads: see `Mitigation`.
        diagnosis: see `Mitigation`.
    """

    rate: Finite = 0.0
    bias: Finite = 0.0
    weights: Annotated[str | None, BeforeValidator(lambda path: path and str(path))] = None
    sha256: str | None = None

    files = ("weights",)

    @model_validator(mode="before")
    @classmethod
    def _identify(cls, values: Any) -> Any:
        """Records what the file holds, as part of the fingerprint of a mitigated model."""
        if not isinstance(values, Mapping) or not values.get("weights") or values.get("sha256"):
            return values
        return {**values, "sha256": digest_of(str(values["weights"]))}

    @classmethod
    def undefined(cls, cell: type[Cell]) -> str | None:
        if cell.rate_weight is None and cell.bias_weight is None:
            return "no weight of it sets time scales alone; use state_norm"
        return None

    @property
    def calibration(self) -> Calibration | None:
        return self._calibration if self._file is None else self._file.known

    @property
    def _file(self) -> Any:
        return None if self.weights is None else read_additions(self.weights, str(self.sha256))

    def bind(self, layer: int, heads: Tensor) -> Edit:
        weights = None if self._file is None else self._file.layers.get(layer)
        if weights is not None and not heads.all():
            raise UserError(
                "the weights of time_scales belong to all heads of a layer: give layers in the "
                "place of heads, or leave weights out"
            )
        return Edit(
            rate=_additions(self.rate, layer, heads),
            bias=_additions(self.bias, layer, heads),
            weights=weights,
        )


def _additions(value: Any, layer: int, heads: Tensor) -> Tensor | None:
    """The additions of the heads of a layer, `(h, 1)` or `(h, k)` float64; None for none."""
    if isinstance(value, list):
        value = value[layer]
    if value in (None, 0.0):
        return None
    by_head = value if isinstance(value, list) else [value] * len(heads)
    width = max(len(number) if isinstance(number, list) else 1 for number in by_head)
    rows = [number if isinstance(number, list) else [number or 0.0] * width for number in by_head]
    return torch.tensor(rows, dtype=torch.float64).where(heads[:, None], 0.0)
