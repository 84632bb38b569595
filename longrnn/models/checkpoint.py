"""Checkpoint folders: `config.json`, `model.safetensors`, and nothing that could run code.

`longrnn.hf.loading.load` verifies them against `checksums.json` in the same folder.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from longrnn.checksums import remove_checksums, write_checksums
from longrnn.config import build_config
from longrnn.errors import UserError
from longrnn.files import one_line, read_json, write_atomic
from longrnn.models.config import RecurrentConfig
from longrnn.models.recurrent import RecurrentLM

logger = logging.getLogger(__name__)

FORMAT = 1
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def save_model(
    model: RecurrentLM,
    folder: Path,
    *,
    tokenizer: str = "bytes",
    weights: Mapping[str, Tensor] | None = None,
    mitigation: str | None = None,
) -> None:
    """Writes a checkpoint folder that `load` reads.

    Args:
        model: the model.
        folder: created if it does not exist.
        tokenizer: `bytes`, or a path for `load_tokenizer`.
        weights: the full state dict, if the model itself holds only shards of it.
        mitigation: the spec of the one under which the model was trained; by default the model's.

    Raises:
        UserError: tied weights differ.
    """
    from safetensors.torch import save

    whole = model.state_dict() if weights is None else weights
    tensors = {name: tensor.contiguous() for name, tensor in whole.items()}
    if model.config.tie_embeddings:
        head = tensors.pop("head.weight")
        if not torch.equal(head, tensors["embedding.weight"]):
            raise UserError(
                f"{folder} would lose the head, which has other weights than the embedding, and "
                "the configuration ties them: set model.head.weight = model.embedding.weight"
            )
    description = {
        "model_type": "longrnn",
        "format": FORMAT,
        "tokenizer": tokenizer,
        "config": asdict(model.config),
    }
    if mitigation or model.trained_under:
        description["mitigation"] = mitigation or model.trained_under
    remove_checksums(folder)
    write_atomic(folder / "model.safetensors", save(tensors))
    write_atomic(folder / "config.json", json.dumps(description, indent=2) + "\n")
    write_checksums(folder)


def read_description(folder: Path) -> dict[str, Any]:
    """Reads the `config.json` of a checkpoint folder.

    Raises:
        UserError: the file is missing, or the checkpoint is not in longrnn's own format.
    """
    path = folder / "config.json"
    if not path.is_file():
        raise UserError(
            f"{folder} is not a checkpoint folder (it has no config.json): give a folder with one"
        )
    description = read_json(path)
    if description.get("model_type") != "longrnn":
        kind = description.get("model_type")
        raise UserError(
            f"{folder} holds a model of type {kind!r}: give a checkpoint that longrnn has "
            "trained (model_type 'longrnn')"
        )
    if description.get("format") != FORMAT:
        raise UserError(
            f"{folder} has checkpoint format {description.get('format')}, this version reads "
            f"{FORMAT}: update longrnn"
        )
    return description


def load_model(
    folder: Path, *, backend: str = "auto", weights: Mapping[str, Tensor] | None = None
) -> RecurrentLM:
    """Reads a model that `save_model` or transformers wrote, onto the CPU.

    Args:
        folder: the checkpoint.
        backend: implementation of the recurrence; `auto` for the default of the cell.
        weights: the content of several weight files; None to read `model.safetensors`.

    Raises:
        UserError: a file is missing, truncated, or does not fit.
    """
    from safetensors.torch import load_file

    description = read_description(folder)
    config = build_config(
        RecurrentConfig, description.get("config"), source=str(folder / "config.json")
    )
    path = folder / "model.safetensors"
    if weights is not None:
        model = build_model(config, _own_names(weights), source=folder, backend=backend)
        return _with_mitigation(model, description, folder)
    if not path.is_file():
        raise UserError(f"{folder} is incomplete (it has no model.safetensors): copy it again")
    try:
        tensors = load_file(path)
    except Exception as error:  # a SafetensorError, or what torch raises for a dtype it lacks
        raise UserError(
            f"{path} is truncated or damaged ({one_line(error)}): copy it again"
        ) from error
    return _with_mitigation(
        build_model(config, _own_names(tensors), source=path, backend=backend), description, folder
    )


def _with_mitigation(
    model: RecurrentLM, description: Mapping[str, Any], folder: Path
) -> RecurrentLM:
    """Notes the mitigation under which a model was trained."""
    recorded = description.get("mitigation")
    if not isinstance(recorded, str | None):
        raise UserError(f"{folder} has a mitigation that is not a text: copy its config.json again")
    model.trained_under = recorded
    return model


def _own_names(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Weights by their names in `RecurrentLM`; transformers writes `model.` in front of them."""
    return {name.removeprefix("model."): tensor for name, tensor in tensors.items()}


def build_model(
    config: RecurrentConfig,
    tensors: Mapping[str, Tensor],
    *,
    source: Path,
    backend: str = "auto",
    source_name: Callable[[str], str] = str,
) -> RecurrentLM:
    """Builds a model in eval mode from weights, each of which keeps its dtype.

    Args:
        config: describes the model.
        tensors: weights by their names in `RecurrentLM`; a tied head may be left out.
        source: the file they come from, for error messages.
        backend: implementation of the recurrence; `auto` for that of the configuration, or if this
            machine cannot run it, for the fastest one that it can.
        source_name: maps a name in `RecurrentLM` to the name in `source`.

    Raises:
        UserError: a weight is missing, unexpected, or of another shape or dtype, or this machine
            cannot run the backend.
    """
    _select_backend(config, backend)
    given = dict(tensors)
    if config.tie_embeddings:
        given.setdefault("head.weight", given.get("embedding.weight", torch.empty(0)))
    model = _skeleton(config, source, len(tensors))
    expected = model.state_dict()
    for name in sorted(expected.keys() | given.keys()):
        wanted = tuple(expected[name].shape) if name in expected else None
        found = tuple(given[name].shape) if name in given else None
        if wanted != found:
            raise UserError(
                f"{source} does not fit its config.json: {source_name(name)} has shape {found}, "
                f"{wanted} was expected; copy both files again"
            )
    _check_dtypes(model, given, source, source_name)
    if config.tie_embeddings and not torch.equal(given["head.weight"], given["embedding.weight"]):
        raise UserError(
            f"{source} does not fit its config.json: {source_name('head.weight')} is not "
            f"{source_name('embedding.weight')}, to which it is tied; copy both files again"
        )
    # Copies, so that the weights do not change if the memory-mapped file does.
    copies = {name: given[name].clone(memory_format=torch.contiguous_format) for name in expected}
    model.load_state_dict(copies, assign=True)
    model.requires_grad_()
    if config.tie_embeddings:
        model.head.weight = model.embedding.weight
    return model.eval()


def _select_backend(config: RecurrentConfig, backend: str) -> None:
    """Writes the backend that computes a model into its configuration.

    `auto` is that of the configuration if this version has it; else each call chooses.
    """
    known = backend if backend != "auto" else config.mixer.get("backend", "auto")
    if "backend" in config.mixer or known != "auto":
        config.mixer = {**config.mixer, "backend": known}


def cast_weights(model: RecurrentLM, dtype: torch.dtype | None) -> RecurrentLM:
    """Casts all weights to a dtype, except that `Cell.wide_weights` are never narrowed.

    Args:
        model: changed in place and returned.
        dtype: the target; None changes nothing.
    """
    if dtype is None:
        return model
    kept = [cell.get_parameter(name) for cell in model.cells for name in cell.wide_weights]
    values = [parameter.data for parameter in kept]
    model.to(dtype)
    for parameter, value in zip(kept, values, strict=True):
        parameter.data = value.to(torch.promote_types(value.dtype, dtype))
    return model


def _skeleton(config: RecurrentConfig, source: Path, n_weights: int) -> RecurrentLM:
    """Builds a model on the meta device, so that the sizes in a damaged file allocate no memory.

    Raises:
        UserError: invalid sizes, more layers than weights, or sizes too large for a tensor.
    """
    if config.n_layers > n_weights:
        raise UserError(
            f"{source} does not fit its config.json: it has {n_weights} weights and config.json "
            f"says n_layers {config.n_layers}; copy both files again"
        )
    try:
        with torch.device("meta"):
            return RecurrentLM(config)
    except UserError as error:
        raise UserError(f"{source} does not fit its config.json: {error}") from error
    except Exception as error:  # torch raises several types for sizes that are too large
        raise UserError(
            f"no model can be built from the config.json of {source} ({one_line(error)}): copy the "
            "checkpoint again"
        ) from error


def _check_dtypes(
    model: RecurrentLM, given: Mapping[str, Tensor], source: Path, source_name: Callable[[str], str]
) -> None:
    """Refuses dtypes that the model cannot compute with.

    All matrices must have the same dtype. Norms, rates and tables may have another one: the
    published Mamba-2 has float32 rates and float16 matrices.
    """
    for name, tensor in given.items():
        if tensor.dtype not in DTYPES:
            raise UserError(
                f"{source} holds {source_name(name)} as {tensor.dtype}, and weights must be "
                "float16, bfloat16, float32 or float64: save the checkpoint in one of these"
            )
    first = "embedding.weight"
    for path, module in model.named_modules():
        if not isinstance(module, (nn.Embedding, nn.Linear, nn.RNNBase)):
            continue
        for name, _ in module.named_parameters(prefix=path, recurse=False):
            if given[name].dtype != given[first].dtype:
                raise UserError(
                    f"{source} holds {source_name(first)} as {given[first].dtype} and "
                    f"{source_name(name)} as {given[name].dtype}: save its matrices in one dtype"
                )
