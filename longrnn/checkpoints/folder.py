"""The files of a checkpoint folder, and a model from its weights; nothing in it can run code.

`longrnn.checkpoints.load.load` verifies the files against `checksums.json` in the same folder.
"""

import re
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from longrnn.errors import UserError
from longrnn.files import read_json, regular
from longrnn.models.base import LanguageModel
from longrnn.models.config import RecurrentConfig
from longrnn.models.recurrent import RecurrentLM

ModelT = TypeVar("ModelT", bound=LanguageModel)
CHECKPOINT_FORMAT = 2
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
# Layers whose weights have the dtype of the activations; those of other layers are cast.
PRODUCTS = (nn.Linear, nn.Embedding, nn.RNNBase)
OPTIONS = tuple(option.name for option in fields(RecurrentConfig))
# Files of weights, the preferred ones first; a pickle is read with `weights_only=True`.
WEIGHT_FILES = (
    "model.safetensors",
    "model-*-of-*.safetensors",
    "pytorch_model.bin",
    "pytorch_model-*-of-*.bin",
)

# Elementwise functions with which cells compute initial values.
INITIAL_VALUES = {"add", "div", "exp", "expm1", "log", "mul", "neg", "sub", "uniform_"}


def read_config(folder: Path) -> dict[str, Any]:
    """Returns the content of a checkpoint's `config.json`.

    Raises:
        UserError: there is none, it is not a mapping, or it is of another version of longrnn.
    """
    path = folder / "config.json"
    if not path.is_file():
        raise UserError(
            f"{folder} is not a checkpoint folder (it has no config.json): give a folder with one"
        )
    config = read_json(path)
    if config.get("model_type") == "longrnn" and config.get("format") != CHECKPOINT_FORMAT:
        raise UserError(
            f"{folder} has checkpoint format {config.get('format')}, and this version of longrnn "
            f"reads {CHECKPOINT_FORMAT}: use the version that wrote it"
        )
    return config


def read_weights(folder: Path) -> dict[str, Tensor]:
    """Returns all tensors of a checkpoint by name, on the CPU, from one file or from several.

    Raises:
        UserError: weights are missing.
        Exception: see `read_tensors`.
    """
    for pattern in WEIGHT_FILES:
        if paths := sorted(folder.glob(pattern)):
            weights: dict[str, Tensor] = {}
            for path in paths:
                for name, tensor in read_tensors(path).items():
                    if weights.setdefault(name, tensor) is not tensor:
                        raise ValueError(f"{path.name} and another file both have {name}")
            return weights
    raise UserError(
        f"{folder} is incomplete (it has none of {', '.join(WEIGHT_FILES)}): copy or "
        "download it again"
    )


def read_tensors(path: Path) -> Any:
    """Returns what a file of tensors and plain values holds, on the CPU; never code of a pickle.

    Raises:
        Exception: of other libraries, for a damaged file or a pickle of anything else.
    """
    from huggingface_hub import load_state_dict_from_file

    options: Any = {"safe": False, "weights_only": True}  # by its name a pickle or not
    return load_state_dict_from_file(regular(path), map_location="cpu", **options)


def build_model(
    config: RecurrentConfig, tensors: Mapping[str, Tensor], *, backend: str = "auto"
) -> RecurrentLM:
    """Builds a model in eval mode from weights, each of which keeps its dtype.

    Args:
        config: describes the model.
        tensors: weights by their names in `RecurrentLM`; a tied head may be left out. One that
            differs from the embedding is used, and the head is then not tied, as in transformers.
        backend: implementation of the recurrence; `auto` for that of the configuration.

    Raises:
        ValueError: a weight is missing, unexpected, of another shape, or without values.
    """
    if backend != "auto":
        config.mixer = {**config.mixer, "backend": backend}
    given = dict(tensors)
    if config.tie_embeddings and "embedding.weight" in given:
        given.setdefault("head.weight", given["embedding.weight"])
    # On the meta device, so that the sizes in a damaged file allocate no memory.
    with torch.device("meta"), _ShapesAlone():
        model = RecurrentLM(config)
    check_weights(model.state_dict(), given)
    model.load_state_dict(given, strict=True, assign=True)
    embedding, head = model.embedding.weight, model.head.weight
    is_equal = head.dtype == embedding.dtype and torch.equal(head, embedding)
    config.tie_embeddings = config.tie_embeddings and is_equal
    if config.tie_embeddings:
        model.head.weight = embedding
    for weight in (*model.parameters(), *model.buffers()):
        # Copies, so that the weights do not change if the memory-mapped file does.
        weight.data = weight.data.clone(memory_format=torch.contiguous_format)
    return model.eval()


class _ShapesAlone(TorchFunctionMode):
    """Gives initial values their shapes alone, which is all that a model on `meta` needs.

    torch computes these functions for `meta` in Python, and imports its compiler for this, which
    takes longer than everything else in loading a small checkpoint.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        values = kwargs or {}
        if getattr(func, "__module__", "") == "torch.nn.init":
            return values["tensor"] if "tensor" in values else args[0]
        if func.__name__ in INITIAL_VALUES:
            shapes = [value.shape for value in args if isinstance(value, Tensor)]
            return torch.empty(np.broadcast_shapes(*shapes))
        return func(*args, **values)


def check_weights(expected: Mapping[str, Tensor], weights: Mapping[str, Any]) -> None:
    """Raises a ValueError that names the first weight that does not fit.

    Args:
        expected: the state dict of a model, perhaps on the meta device.
        weights: what is to be loaded into it, by the same names.
    """
    for name in [*expected, *weights]:
        if name not in weights:
            raise ValueError(f"it has no {name}")
        if name not in expected:
            raise ValueError(f"it has {name}, which is not a weight of this model")
        weight, shape = weights[name], tuple(expected[name].shape)
        if not isinstance(weight, Tensor) or weight.is_meta or weight.layout != torch.strided:
            raise ValueError(f"{name} is not a tensor with values")
        if weight.shape != shape:
            raise ValueError(f"{name} has shape {tuple(weight.shape)}, and {shape} was expected")


def cast_weights(model: ModelT, dtype: torch.dtype | None) -> ModelT:
    """Casts all weights to a dtype, except that `Cell.wide_weights` are never narrowed.

    Args:
        model: changed in place and returned.
        dtype: the target; None changes nothing.

    Raises:
        UserError: factors of products are of several dtypes, or a weight is of none in `DTYPES`.
    """
    if dtype is None:
        layers = [module for module in model.modules() if isinstance(module, PRODUCTS)]
        dtypes = {str(weight.dtype) for layer in layers for weight in layer.parameters()}
        if len(dtypes) > 1 or not {w.dtype for w in model.state_dict().values()} <= {*DTYPES}:
            raise UserError(
                f"its weights are of {', '.join(sorted(dtypes))} and others, which are not "
                "computed together: load CHECKPOINT+float32"
            )
        return model
    kept = [cell.get_parameter(name) for cell in model.cells for name in cell.wide_weights]
    values = [parameter.data for parameter in kept]
    model.to(dtype)
    for parameter, value in zip(kept, values, strict=True):
        parameter.data = value.to(torch.promote_types(value.dtype, dtype))
    return model


def dtypes_of(model: nn.Module) -> dict[str, torch.dtype]:
    """Returns the dtypes of weights and buffers by name without numbers, as layers are alike."""
    named = (*model.named_parameters(remove_duplicate=False), *model.named_buffers())
    return {_without_numbers(name): tensor.dtype for name, tensor in named}


def cast_to(model: nn.Module, dtypes: Mapping[str, torch.dtype]) -> None:
    """Casts weights and buffers to the dtypes that `dtypes_of` returned of a model like it."""
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        tensor.data = tensor.data.to(dtypes[_without_numbers(name)])


def _without_numbers(name: str) -> str:
    return re.sub(r"\d+", "", name)
