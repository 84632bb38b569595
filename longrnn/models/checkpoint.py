"""Checkpoint folders: `config.json` and `model.safetensors`, and nothing that could run code."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from longrnn.config import build_config
from longrnn.errors import UserError
from longrnn.files import write_atomic
from longrnn.models.recurrent import RecurrentConfig, RecurrentLM

FORMAT = 1


def save_model(
    model: RecurrentLM,
    folder: Path,
    *,
    tokenizer: str = "bytes",
    weights: Mapping[str, Tensor] | None = None,
) -> None:
    """Writes a model so that `load` finds it.

    Args:
        model: the model.
        folder: made where it is missing.
        tokenizer: `bytes`, or a path for `load_tokenizer`.
        weights: the model's state dict, where the model itself holds shards of it.
    """
    from safetensors.torch import save

    whole = model.state_dict() if weights is None else weights
    tensors = {name: tensor.contiguous() for name, tensor in whole.items()}
    if model.config.tie_embeddings:
        del tensors["head.weight"]
    description = {
        "model_type": "longrnn",
        "format": FORMAT,
        "tokenizer": tokenizer,
        "config": asdict(model.config),
    }
    write_atomic(folder / "model.safetensors", save(tensors))
    write_atomic(folder / "config.json", json.dumps(description, indent=2) + "\n")


def read_description(folder: Path) -> dict[str, Any]:
    """The content of a checkpoint's `config.json`.

    Raises:
        UserError: the file is missing or is not one of ours.
    """
    path = folder / "config.json"
    if not path.is_file():
        raise UserError(
            f"{folder} is not a checkpoint folder (it has no config.json): give a folder with one"
        )
    try:
        description = json.loads(path.read_text())
    except ValueError as error:
        raise UserError(f"{path} is not JSON ({error}): write the checkpoint again") from error
    if not isinstance(description, dict) or description.get("model_type") != "longrnn":
        kind = description.get("model_type") if isinstance(description, dict) else None
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


def load_model(folder: Path, *, backend: str = "auto") -> RecurrentLM:
    """Reads a model that `save_model` wrote, on the CPU.

    Args:
        folder: the checkpoint.
        backend: of the recurrence; `auto` leaves the choice to the cell.

    Raises:
        UserError: a file is missing, truncated, or does not fit.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    description = read_description(folder)
    config = build_config(
        RecurrentConfig, description.get("config"), source=str(folder / "config.json")
    )
    path = folder / "model.safetensors"
    if not path.is_file():
        raise UserError(f"{folder} is incomplete (it has no model.safetensors): copy it again")
    try:
        tensors = load_file(path)
    except SafetensorError as error:
        raise UserError(f"{path} is truncated or damaged ({error}): copy it again") from error
    return build_model(config, tensors, source=path, backend=backend)


def build_model(
    config: RecurrentConfig,
    tensors: Mapping[str, Tensor],
    *,
    source: Path,
    backend: str = "auto",
    called: Callable[[str], str] = str,
) -> RecurrentLM:
    """A model with these weights, each in the dtype that it comes in, ready for evaluation.

    Args:
        config: what to build.
        tensors: by their names in `RecurrentLM`; a tied head may be left out.
        source: where they come from, for errors.
        backend: of the recurrence; `auto` leaves the choice to the cell.
        called: the name that a weight has in the source.

    Raises:
        UserError: a weight is missing, has another shape, or is one too many.
    """
    if backend != "auto":
        config.mixer = {**config.mixer, "backend": backend}
    with torch.random.fork_rng(devices=[]):  # building a model draws weights that are not kept
        model = RecurrentLM(config)
    expected, given = model.state_dict(), dict(tensors)
    if config.tie_embeddings:
        given.setdefault("head.weight", given.get("embedding.weight", torch.empty(0)))
    for name in sorted(expected.keys() | given.keys()):
        wanted = tuple(expected[name].shape) if name in expected else None
        found = tuple(given[name].shape) if name in given else None
        if wanted != found:
            raise UserError(
                f"{source} does not fit its config.json: {called(name)} has shape {found}, "
                f"{wanted} was expected; copy both files again"
            )
    if config.tie_embeddings and not torch.equal(given["head.weight"], given["embedding.weight"]):
        raise UserError(
            f"{source} does not fit its config.json: {called('head.weight')} is not "
            f"{called('embedding.weight')}, to which it is tied; copy both files again"
        )
    for name, parameter in model.named_parameters():
        parameter.data = torch.empty_like(parameter, dtype=given[name].dtype)
    model.load_state_dict(given)
    return model.eval()
