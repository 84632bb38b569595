"""What a run can train: a recurrent model of ours, or a transformer of transformers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeAlias

from torch import Tensor

from longrnn.config import build_config
from longrnn.errors import UserError
from longrnn.hf.loading import load
from longrnn.hf.tokenizer import HFTokenizer
from longrnn.hf.training import TransformerLM, build_transformer, read_transformer, save_transformer
from longrnn.mitigations import Mitigated
from longrnn.models.checkpoint import load_model, save_model
from longrnn.models.recurrent import RecurrentConfig, RecurrentLM
from longrnn.text import Tokenizer
from longrnn.training.config import TrainConfig

Trained: TypeAlias = RecurrentLM | TransformerLM


def build(config: TrainConfig) -> Trained:
    """The model that a run begins with. Where it goes on from one, `config.model` becomes that's.

    Raises:
        UserError: a configuration or a checkpoint that does not fit.
    """
    if config.init_from is not None:
        model = load(config.init_from)
        if isinstance(model, Mitigated):
            raise UserError(
                f"init_from={config.init_from} names a mitigation, which is not trained: leave out "
                "what follows the plus"
            )
        if not isinstance(model, RecurrentLM):
            return TransformerLM(model.model)
        config.model = model.config
        return model
    if config.transformer:
        return build_transformer(config.transformer)
    return RecurrentLM(config.model)


def description(model: Trained) -> dict[str, Any]:
    """What `rebuild` builds the model from, but for its weights."""
    if isinstance(model, TransformerLM):
        options = model.model.config.to_diff_dict()
        return {"transformer": {k: v for k, v in options.items() if k != "transformers_version"}}
    return asdict(model.config)


def rebuild(described: Mapping[str, Any], source: str) -> Trained:
    """A model of a `description`; `source` names it in errors."""
    if "transformer" in described:
        return build_transformer(described["transformer"])
    return RecurrentLM(build_config(RecurrentConfig, described, source=source))


def save(model: Trained, folder: Path, tokenizer: Tokenizer, weights: Mapping[str, Tensor]) -> None:
    """Writes a model with its tokenizer, so that the folder can be moved."""
    if isinstance(model, TransformerLM):
        save_transformer(model, folder, tokenizer, weights)
    elif isinstance(tokenizer, HFTokenizer):
        tokenizer.save(folder)
        save_model(model, folder, tokenizer="tokenizer.json", weights=weights)
    else:
        save_model(model, folder, weights=weights)


def read(model: Trained, folder: Path) -> Mapping[str, Tensor]:
    """The weights that `save` wrote of such a model."""
    if isinstance(model, TransformerLM):
        return read_transformer(folder, model)
    return load_model(folder).state_dict()
