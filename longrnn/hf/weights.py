"""Weights of a checkpoint folder as plain tensors: safetensors, or a pickle of nothing else."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from torch import Tensor

from longrnn.errors import UserError


def read_json(path: Path) -> dict[str, Any]:
    """A JSON file that holds a mapping.

    Raises:
        UserError: it is missing, or something else.
    """
    if not path.is_file():
        raise UserError(f"{path.parent} is incomplete (it has no {path.name}): copy it again")
    try:
        content = json.loads(path.read_text())
    except (ValueError, OSError) as error:
        raise UserError(f"{path} is not JSON ({error}): copy it again") from error
    if not isinstance(content, dict):
        raise UserError(f"{path} is not a mapping of keys to values: copy it again")
    return content


def read_weights(folder: Path) -> dict[str, Tensor]:
    """All tensors of a checkpoint, on the CPU, whether in one file or in several.

    Safetensors are taken before a pickle, and a pickle is read with `weights_only=True`.

    Raises:
        UserError: there are none, a file is missing or damaged, or a pickle holds something else.
    """
    for name in READERS:
        index = folder / f"{name}.index.json"
        if (folder / name).is_file():
            return _read(folder / name)
        if index.is_file():
            parts = read_json(index).get("weight_map")
            if not isinstance(parts, dict):
                raise UserError(f"{index} has no weight_map: copy it again")
            tensors: dict[str, Tensor] = {}
            for part in sorted(set(parts.values())):
                tensors |= _read(folder / Path(part).name)
            return tensors
    raise UserError(
        f"{folder} is incomplete (it has none of {', '.join(READERS)}): copy or download it again"
    )


def _read(path: Path) -> dict[str, Tensor]:
    if not path.is_file():
        raise UserError(f"{path.parent} is incomplete (it has no {path.name}): copy it again")
    reader = next(read for name, read in READERS.items() if path.suffix == Path(name).suffix)
    return reader(path)


def read_safetensors(path: Path) -> dict[str, Tensor]:
    """The tensors of one file.

    Raises:
        UserError: it is damaged.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        return load_file(path)
    except SafetensorError as error:
        raise UserError(f"{path} is truncated or damaged ({error}): copy it again") from error


def _read_pickle(path: Path) -> dict[str, Tensor]:
    try:
        with warnings.catch_warnings():  # of a pickle that is refused below anyway
            warnings.simplefilter("ignore")
            content = torch.load(path, map_location="cpu", weights_only=True)
    except UnpicklingError as error:
        raise UserError(
            f"{path} is a pickle of more than tensors, which could run code when it is read: "
            "take a safetensors version of the checkpoint"
        ) from error
    except (RuntimeError, EOFError, OSError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise UserError(f"{path} is truncated or damaged ({reason}): copy it again") from error
    if not isinstance(content, Mapping) or not all(
        isinstance(name, str) and isinstance(tensor, Tensor) for name, tensor in content.items()
    ):
        raise UserError(
            f"{path} holds something else than named tensors: give a checkpoint of weights alone"
        )
    return dict(content)


READERS: dict[str, Callable[[Path], dict[str, Tensor]]] = {
    "model.safetensors": read_safetensors,
    "pytorch_model.bin": _read_pickle,
}
