"""Positions of a Hugging Face model: how many there are, and how they are computed."""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers import PreTrainedConfig

# Rotary scalings under which the rotation of a token depends on the length of the text.
LENGTH_DEPENDENT = ("dynamic", "longrope")


def longest(config: PreTrainedConfig) -> int | None:
    """Return the maximum length in a configuration, in tokens; None if it has none."""
    length = getattr(config, "max_position_embeddings", None)
    return int(length) if length else None


def scaling_by_length(config: PreTrainedConfig) -> str | None:
    """Return the rotary scaling that depends on the length of a text; None for any other."""
    rotary = getattr(config, "rope_parameters", None) or {}
    nested = [value for value in rotary.values() if isinstance(value, dict)]
    kinds = [one.get("rope_type") for one in (rotary, *nested)]
    return next((kind for kind in kinds if kind in LENGTH_DEPENDENT), None)


def table_of_positions(model: Any) -> str | None:
    """Return the name of a table of position embeddings; None if positions are computed.

    In a causal language model, every embedding that is not of tokens is of positions.
    """
    tokens = (model.get_input_embeddings(), model.get_output_embeddings())
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding) and module not in tokens:
            return name
    names = (name for name, _ in model.named_buffers())
    return next((name for name in names if name.endswith("embed_positions")), None)
