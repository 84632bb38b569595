"""Loads a model whose code is in transformers from its folder."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from longrnn.hf.foreign import ForeignLM
from longrnn.hf.hybrid.families import quietly, wide_weights
from longrnn.hf.hybrid.model import open_hugging_face

logger = logging.getLogger(__name__)


def load_transformer(
    folder: Path,
    config: Mapping[str, Any],
    dtype: torch.dtype | None,
    device: str | torch.device | None,
) -> ForeignLM:
    """Load a causal language model whose code is in transformers, with the dtype of its weights."""
    kind = str(config.get("model_type"))
    with quietly(), wide_weights(kind):
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            folder,
            dtype="auto" if dtype is None else dtype,
            trust_remote_code=False,
            local_files_only=True,
            weights_only=True,
            output_loading_info=True,
            ignore_mismatched_sizes=True,
        )
    model, report = loaded
    misfits = {name: tuple(found) for name, found, _ in report["mismatched_keys"]}
    for name, shape in sorted((misfits | dict.fromkeys(report["missing_keys"])).items()):
        wanted = tuple(model.state_dict()[name].shape)
        raise ValueError(f"{name} has shape {shape}, and {wanted} was expected")
    # Weights that an architecture is known to ignore, such as rotary tables, are not listed here.
    unused = sorted(report["unexpected_keys"])
    if unused:
        logger.warning(
            f"{folder} has {len(unused)} weights that a Hugging Face {kind} does not use, the "
            f"first {unused[0]}: check that its config.json belongs to this checkpoint"
        )
    if device is not None:
        model.to(device)  # where its kernels are those that the check will run
    return open_hugging_face(model)
