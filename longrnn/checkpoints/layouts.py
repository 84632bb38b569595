"""Layouts of checkpoints: ours, and those of mamba-ssm and of transformers for Mamba-1 and 2.

Each stores a `RecurrentLM`. A checkpoint that `RecurrentLM` cannot compute exactly is refused,
never approximated.
"""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from safetensors.torch import save
from torch import Tensor

from longrnn.checkpoints.folder import (
    CHECKPOINT_FORMAT,
    OPTIONS,
    build_model,
    read_config,
    read_weights,
)
from longrnn.checkpoints.mamba_configs import (
    MODEL_TYPES,
    hugging_face_config,
    read_hugging_face,
    read_native,
    refuse_losses,
    write_native,
)
from longrnn.checksums import remove_checksums, write_checksums
from longrnn.errors import UserError
from longrnn.files import write_atomic
from longrnn.models.recurrent import RecurrentConfig, RecurrentLM
from longrnn.options import validated

if TYPE_CHECKING:
    from transformers import PreTrainedModel

OURS = "ours"


class Layout(NamedTuple):
    """A file format of checkpoints.

    Attributes:
        names: prefixes of weight names, from ours to those of the layout.
        other_names: prefixes that it also reads, and those in `RecurrentLM`.
        is_described: whether the content of a `config.json` is of this layout.
        read: returns our configuration for that content and the path of the file.
        write: returns the content of `config.json` for a model and the name of its tokenizer, or
            raises a UserError for a model of cells that the layout does not have.
        file: name of the file of weights.
    """

    names: Mapping[str, str]
    other_names: Mapping[str, str]
    is_described: Callable[[Mapping[str, Any]], bool]
    read: Callable[[Mapping[str, Any], str], RecurrentConfig]
    write: Callable[[RecurrentLM, str], Mapping[str, Any]]
    file: str = "model.safetensors"

    def rename(self, weights: Mapping[str, Tensor], *, to_ours: bool = False) -> dict[str, Tensor]:
        """Return weights under the names of the layout, or of `RecurrentLM`.

        Raises:
            ValueError: two weights get the same name.
        """
        renamed: dict[str, Tensor] = {}
        for name, tensor in weights.items():
            if renamed.setdefault(self.renamed(name, to_ours=to_ours), tensor) is not tensor:
                raise ValueError(f"{name} is stored under another name too")
        return renamed

    def renamed(self, name: str, *, to_ours: bool = False) -> str:
        """Return the name of a weight in the layout, or in `RecurrentLM`."""
        prefixes = dict(self.names)
        if to_ours:
            prefixes = {theirs: ours for ours, theirs in self.names.items()}
            prefixes |= self.other_names
        prefix = next((prefix for prefix in prefixes if name.startswith(prefix)), "")
        return prefixes.get(prefix, "") + name.removeprefix(prefix)

    def load(self, folder: Path, config: Mapping[str, Any], backend: str) -> RecurrentLM:
        """Read a model from a folder whose `config.json` has the given content, onto the CPU.

        Args:
            folder: the checkpoint.
            config: the content.
            backend: implementation of the recurrence; `auto` for the default of the cell.

        Raises:
            UserError: a configuration that longrnn cannot compute exactly.
            Exception: of the libraries that read files, for damaged files.
        """
        options = self.read(config, str(folder / "config.json"))
        is_tied = options.tie_embeddings
        weights = self.rename(read_weights(folder), to_ours=True)
        model = build_model(options, weights, backend=backend)
        if is_tied and not options.tie_embeddings and self is LAYOUTS["native"]:
            raise UserError(
                f"{folder} has tie_embeddings = True and a lm_head.weight that differs from "
                "backbone.embedding.weight, which mamba-ssm cannot compute: set tie_embeddings to "
                "false in its config.json"
            )
        model.trained_under = config.get("mitigation")
        return model

    def save(
        self,
        model: RecurrentLM,
        folder: Path,
        tokenizer: str = "tokenizer.json",
        weights: Mapping[str, Tensor] | None = None,
    ) -> None:
        """Write `config.json` and the weights into the files that readers of the layout expect.

        Args:
            model: the model.
            folder: created if it does not exist.
            tokenizer: `bytes`, or a path for `load_tokenizer`.
            weights: the full state dict, if the model itself holds only shards of it.

        Raises:
            UserError: see `write`, or the layout loses an option.
        """
        path, description = folder / "config.json", self.write(model, tokenizer)
        write_atomic(path, json.dumps(description, indent=2) + "\n")
        if self.write is not _write_ours:
            refuse_losses(model.config, self.read(read_config(folder), str(path)))
        renamed = self.rename(model.state_dict() if weights is None else weights)
        tensors = {name: tensor.contiguous() for name, tensor in renamed.items()}
        if self.file.endswith(".bin"):  # with the weights of a tied head under their own name
            pickled = io.BytesIO()  # torch.save into a file on a full disk raises a RuntimeError
            torch.save(tensors, pickled)
            content = pickled.getbuffer()
        else:
            if model.config.tie_embeddings:
                del tensors[self.renamed("head.weight")]
            content = save(tensors, metadata={"format": "pt"})
        write_atomic(folder / self.file, content)


def save_model(
    model: RecurrentLM,
    folder: Path,
    *,
    tokenizer: str = "bytes",
    weights: Mapping[str, Tensor] | None = None,
) -> None:
    """Write a checkpoint folder of longrnn with checksums; see `Layout.save`."""
    remove_checksums(folder)
    LAYOUTS[OURS].save(model, folder, tokenizer, weights)
    write_checksums(folder)


def _read_ours(config: Mapping[str, Any], source: str) -> RecurrentConfig:
    options = {name: config[name] for name in OPTIONS if name in config}
    return validated(RecurrentConfig, options, source)


def _write_ours(model: RecurrentLM, tokenizer: str) -> dict[str, Any]:
    description = {"model_type": "longrnn", "format": CHECKPOINT_FORMAT, "tokenizer": tokenizer}
    if model.trained_under:
        description["mitigation"] = model.trained_under
    return description | asdict(model.config)


def as_hugging_face(model: RecurrentLM) -> PreTrainedModel:
    """Returns a copy of a model as one of transformers, or raises the UserError of `write`."""
    from transformers import AutoModelForCausalLM

    theirs = AutoModelForCausalLM.from_config(hugging_face_config(model))
    theirs.load_state_dict(LAYOUTS["hf"].rename(model.state_dict()))
    return theirs


NAMES = {"blocks.": "backbone.layers.", "norm.": "backbone.norm_f.", "head.": "lm_head."}
LAYOUTS = {
    OURS: Layout(
        names={},
        other_names={"model.": ""},  # transformers writes it in front of all names
        is_described=lambda config: config.get("model_type") == "longrnn",
        read=_read_ours,
        write=_write_ours,
    ),
    "native": Layout(
        names=NAMES | {"embedding.": "backbone.embedding."},
        other_names={},
        is_described=lambda config: (
            "model_type" not in config and {"d_model", "n_layer"} <= config.keys()
        ),
        read=read_native,
        write=write_native,
        file="pytorch_model.bin",
    ),
    "hf": Layout(
        names=NAMES | {"embedding.": "backbone.embeddings."},
        # The older name of the embedding, that of mamba-ssm, which transformers still accepts.
        other_names={"backbone.embedding.": "embedding."},
        is_described=lambda config: config.get("model_type") in MODEL_TYPES,
        read=read_hugging_face,
        write=lambda model, _: json.loads(hugging_face_config(model).to_json_string()),
    ),
}


def layout_of(config: Mapping[str, Any]) -> str | None:
    """Return the layout of a folder whose `config.json` has this content; None for no other."""
    return next((name for name, known in LAYOUTS.items() if known.is_described(config)), None)
