"""The file of additions to weights, which a calibration writes beside its YAML file."""

import hashlib
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

from torch import Tensor

from longrnn.errors import UserError
from longrnn.files import one_line, read_bytes, write_atomic
from longrnn.mitigations.base import Calibration

FORMAT = "longrnn-weights-1"
CALIBRATE_AGAIN = "copy it again beside the .yaml file, or calibrate again"
# Additions by layer and name of the weight.
Additions = Mapping[int, Mapping[str, Tensor]]


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
