"""`time_scales`: changes the weights that determine how long each head remembers, and what."""

import hashlib
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import torch
from pydantic import BeforeValidator, model_validator
from torch import Tensor

from longrnn.cells import Cell, Edit
from longrnn.errors import UserError
from longrnn.files import one_line, read_bytes, write_atomic
from longrnn.mitigations.base import MITIGATIONS, Calibration, Mitigation
from longrnn.mitigations.values import Finite

# Of the file of additions to weights, which a calibration writes beside its YAML file.
FORMAT = "longrnn-weights-1"
CALIBRATE_AGAIN = "copy it again beside the .yaml file, or calibrate again"
# Additions by layer and name of the weight.
Additions = Mapping[int, Mapping[str, Tensor]]


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


class AdditionsFile(NamedTuple):
    """The content of a file.

    Attributes:
        known: the model for which the additions were made, and on which texts.
        layers: the additions.
    """

    known: Calibration
    layers: Additions


def write_additions(path: Path, layers: Additions, known: Calibration) -> str:
    """Write additions as safetensors, and return the SHA-256 of the file."""
    from safetensors.torch import save

    tensors = {
        f"{layer}/{name}": addition.detach().cpu().contiguous()
        for layer, additions in layers.items()
        for name, addition in additions.items()
    }
    metadata = {"format": FORMAT, "fingerprint": known.fingerprint, "length": str(known.length)}
    content = save(tensors, metadata | {"text_sha256": " ".join(known.text_sha256)})
    write_atomic(path, content)
    return hashlib.sha256(content).hexdigest()


def digest_of(path: str) -> str:
    """The SHA-256 of a file of additions.

    Raises:
        UserError: it cannot be read.
    """
    try:
        return hashlib.sha256(read_bytes(Path(path))).hexdigest()
    except OSError as error:
        raise UserError(f"{path} cannot be read ({one_line(error)}): {CALIBRATE_AGAIN}") from error


@lru_cache(4)
def read_additions(path: str, sha256: str) -> AdditionsFile:
    """Read a file that `write_additions` wrote.

    Args:
        path: of the file.
        sha256: of its bytes.

    Raises:
        UserError: the file is missing, is another one, or holds something else.
    """
    from safetensors import safe_open

    if digest_of(path) != sha256:
        raise UserError(f"{path} is not the file that was calibrated: {CALIBRATE_AGAIN}")
    layers: dict[int, dict[str, Tensor]] = {}
    metadata: dict[str, str] = {}
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            for key in file.keys():  # noqa: SIM118
                layer, _, name = key.partition("/")
                layers.setdefault(int(layer), {})[name] = file.get_tensor(key)
        length, texts = int(metadata["length"]), tuple(metadata["text_sha256"].split())
        known = Calibration(path, metadata["fingerprint"], length, texts)
    except Exception:  # a SafetensorError, or of keys that `write_additions` never writes
        known = None
    if known is None or metadata.get("format") != FORMAT:
        raise UserError(f"{path} is not a file of additions to weights: {CALIBRATE_AGAIN}")
    return AdditionsFile(known, layers)
