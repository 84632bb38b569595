"""Reads the weights of a checkpoint folder: safetensors, or a pickle that holds only tensors."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Container, Mapping
from pathlib import Path
from pickle import UnpicklingError

import torch
from torch import Tensor

from longrnn.errors import UserError
from longrnn.files import one_line, read_json
from longrnn.models.checkpoint import DTYPES

# Names of the dtypes of weights, in safetensors and in torch.
REAL = ("F64", "F32", "F16", "BF16", *map(str, DTYPES))


def read_weights(folder: Path) -> dict[str, Tensor]:
    """Return all tensors of a checkpoint by name, on the CPU, from one file or from several.

    Safetensors are preferred to a pickle, and a pickle is read with `weights_only=True`.

    Raises:
        UserError: there are no weights, a file is missing or damaged, or a pickle holds something
            other than tensors.
    """
    tensors: dict[str, Tensor] = {}
    for path in _files(folder):
        tensors |= _read(path)
    return tensors


def refuse_unreal(folder: Path, parameters: Container[str]) -> None:
    """Refuse a checkpoint with a parameter whose values are not floating-point numbers.

    transformers would convert integers, and drop the imaginary part of complex numbers. Weights are
    not read for this.

    Args:
        folder: has the weights.
        parameters: names of the parameters of the model; others, such as masks, may be integers.

    Raises:
        UserError: names the first such parameter.
    """
    from safetensors import safe_open

    for path in _files(folder):
        if path.suffix == ".safetensors":
            with safe_open(path, framework="pt") as file:
                kinds = {name: file.get_slice(name).get_dtype() for name in file.keys()}  # noqa: SIM118
        else:
            content = torch.load(path, map_location="meta", weights_only=True)
            kinds = {name: str(tensor.dtype) for name, tensor in content.items()}
        for name, kind in kinds.items():
            if name in parameters and kind not in REAL:
                raise UserError(
                    f"{path} holds {name} as {kind.removeprefix('torch.')}, and weights must be "
                    "float16, bfloat16, float32 or float64: save the checkpoint in one of these"
                )


def _files(folder: Path) -> list[Path]:
    """Return the weight files of a checkpoint.

    Raises:
        UserError: there are none.
    """
    for name in READERS:
        index = folder / f"{name}.index.json"
        if (folder / name).is_file():
            return [folder / name]
        if index.is_file():
            return [folder / part for part in _parts(index, Path(name).suffix)]
    raise UserError(
        f"{folder} is incomplete (it has none of {', '.join(READERS)}): copy or download it again"
    )


def _parts(index: Path, suffix: str) -> list[str]:
    """Return the names of the weight files in an index, all of them in the folder of the index.

    Raises:
        UserError: the index names anything else.
    """
    parts = read_json(index).get("weight_map")
    if not isinstance(parts, dict):
        raise UserError(f"{index} has no weight_map of names to files: copy it again")
    for part in parts.values():
        if not isinstance(part, str) or Path(part).name != part or Path(part).suffix != suffix:
            raise UserError(
                f"{index} names {part!r}, which is not a {suffix} file beside it: copy it again"
            )
    return sorted(set(parts.values()))


def _read(path: Path) -> dict[str, Tensor]:
    if not path.is_file():
        raise UserError(f"{path.parent} is incomplete (it has no {path.name}): copy it again")
    reader = next(read for name, read in READERS.items() if path.suffix == Path(name).suffix)
    return reader(path)


def read_safetensors(path: Path) -> dict[str, Tensor]:
    """Return the tensors of one safetensors file by name.

    Raises:
        UserError: the file is damaged.
    """
    from safetensors.torch import load_file

    try:
        return load_file(path)
    except Exception as error:  # a SafetensorError, or torch's error for an unsupported dtype
        raise UserError(
            f"{path} is truncated or damaged ({one_line(error)}): copy it again"
        ) from error


def _read_pickle(path: Path) -> dict[str, Tensor]:
    try:
        with warnings.catch_warnings():  # about pickles that are refused below
            warnings.simplefilter("ignore")
            content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # a damaged pickle can raise any error
        if isinstance(error, UnpicklingError) and _is_pickle(path):
            raise UserError(
                f"{path} is a pickle of more than tensors, which could run code when it is read: "
                "use a safetensors version of the checkpoint"
            ) from error
        reason = one_line(error).split(". ")[0]  # torch appends advice of several sentences
        if isinstance(error, UnpicklingError):
            reason = "torch.save has not written it"
        raise UserError(f"{path} is truncated or damaged ({reason}): copy it again") from error
    if not isinstance(content, Mapping) or not all(
        isinstance(name, str) and isinstance(tensor, Tensor) for name, tensor in content.items()
    ):
        raise UserError(
            f"{path} holds something other than named tensors: give a checkpoint of weights alone"
        )
    for name, tensor in content.items():
        if not _is_stored(tensor):
            raise UserError(
                f"{path} holds {name} as a sparse, quantized or expanded tensor: give a checkpoint "
                "of plain tensors"
            )
    return dict(content)


def _is_pickle(path: Path) -> bool:
    """Whether a file begins as torch.save or pickle writes it."""
    with open(path, "rb") as file:
        return file.read(2) in (b"PK", *(bytes([0x80, protocol]) for protocol in range(2, 6)))


def _is_stored(tensor: Tensor) -> bool:
    """Whether the file holds every element of a tensor, so that its size is as declared."""
    if tensor.layout != torch.strided or tensor.is_quantized or tensor.is_meta:
        return False
    return tensor.numel() * tensor.element_size() <= tensor.untyped_storage().nbytes()


READERS: dict[str, Callable[[Path], dict[str, Tensor]]] = {
    "model.safetensors": read_safetensors,
    "pytorch_model.bin": _read_pickle,
}
