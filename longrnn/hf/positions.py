"""What a model of transformers says of the positions that it has."""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers import PreTrainedConfig

# Scalings of rotary positions under which the same token turns otherwise in a longer text.
LENGTH_DEPENDENT = ("dynamic", "longrope")


def longest(config: PreTrainedConfig) -> int | None:
    """How many tokens a model was made for; None where its configuration does not say."""
    length = getattr(config, "max_position_embeddings", None)
    return int(length) if length else None


def scaling_by_length(config: PreTrainedConfig) -> str | None:
    """The scaling of rotary positions that depends on how long a text is; None for none."""
    rotary = getattr(config, "rope_parameters", None) or {}
    nested = [value for value in rotary.values() if isinstance(value, dict)]
    kinds = [one.get("rope_type") for one in (rotary, *nested)]
    return next((kind for kind in kinds if kind in LENGTH_DEPENDENT), None)


def table_of_positions(model: Any) -> str | None:
    """The name of a table of positions, which ends; None where positions are computed.

    In a causal language model, every embedding that is not of tokens is of positions.
    """
    tokens = (model.get_input_embeddings(), model.get_output_embeddings())
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding) and module not in tokens:
            return name
    names = (name for name, _ in model.named_buffers())
    return next((name for name in names if name.endswith("embed_positions")), None)
