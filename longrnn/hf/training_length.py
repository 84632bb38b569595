"""The length that a checkpoint was trained on."""

from __future__ import annotations

from longrnn.config import read_recorded
from longrnn.errors import UserError
from longrnn.hf.names import resolve, split_spec
from longrnn.units import parse_length


def training_length(checkpoint: str) -> int | None:
    """Returns the training length in tokens from a checkpoint's train.yaml; None without it.

    If a run carried its state, this is the length of one segment.

    Args:
        checkpoint: name, folder, or `CHECKPOINT+MITIGATION`.

    Raises:
        UserError: train.yaml is damaged.
    """
    return read_recorded(resolve(split_spec(checkpoint)[0])).get("length", {}).get("max")


def required_training_length(checkpoint: str, given: str | None = None) -> int:
    """Returns the length that the user gives, such as `4k`, or else the `training_length`.

    Raises:
        UserError: `given` is not a valid length, or the length is not known.
    """
    found = training_length(checkpoint) if given is None else parse_length(given)
    if found is None:
        raise UserError(f"the training length of {checkpoint} is not known: give --train-length")
    return found
