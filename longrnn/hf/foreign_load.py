"""Loads a model whose code is in transformers from its folder."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from longrnn.errors import UserError, nearest
from longrnn.files import one_line
from longrnn.hf.foreign import ForeignLM
from longrnn.hf.hybrid.families import quietly, wide_weights
from longrnn.hf.hybrid.model import open_hugging_face
from longrnn.hf.names import BALANCED
from longrnn.models.checkpoint import DTYPES

logger = logging.getLogger(__name__)


def load_transformer(
    folder: Path,
    config: Mapping[str, Any],
    dtype: torch.dtype | None,
    device: str | torch.device | None,
) -> ForeignLM:
    """Load a causal language model whose code is in transformers, with the dtype of its weights."""
    kind = config.get("model_type")
    if kind not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        remedy = nearest(str(kind), MODEL_FOR_CAUSAL_LM_MAPPING_NAMES) if kind else ""
        if not remedy.startswith("did you mean"):
            remedy = "give a checkpoint of longrnn, of mamba-ssm (Mamba-2), or of such a model"
        raise UserError(
            f"{folder} holds a model of type {kind!r}, which is not a causal language model that "
            f"the installed transformers knows: {remedy}"
        )
    try:
        with quietly(), wide_weights(str(kind)):
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                folder,
                dtype="auto" if dtype is None else dtype,
                device_map=BALANCED if device == BALANCED else None,
                trust_remote_code=False,
                local_files_only=True,
                weights_only=True,
                output_loading_info=True,
                ignore_mismatched_sizes=True,
            )
            model, report = loaded
    except Exception as error:  # transformers raises many kinds of errors for a damaged folder
        raise UserError(f"{folder} cannot be loaded ({one_line(error)}): copy it again") from error
    misfits = {name: tuple(found) for name, found, _ in report["mismatched_keys"]}
    for name, shape in sorted((misfits | dict.fromkeys(report["missing_keys"])).items()):
        wanted = tuple(model.state_dict()[name].shape)
        raise UserError(
            f"{folder} does not fit its config.json: {name} has shape {shape}, {wanted} was "
            "expected; copy both files again"
        )
    if getattr(model.config, "quantization_config", None) is None:
        prefix = f"{model.base_model_prefix}."
        names = {name.removeprefix(prefix) for name, _ in model.named_parameters()}
        _refuse_unreal(folder, names | {prefix + name for name in names})
    # Weights that an architecture is known to ignore, such as rotary tables, are not listed here.
    unused = sorted(report["unexpected_keys"])
    if unused:
        logger.warning(
            f"{folder} has {len(unused)} weights that a Hugging Face {kind} does not use, the "
            f"first {unused[0]}: check that its config.json belongs to this checkpoint"
        )
    if device is not None and device != BALANCED:
        model.to(device)  # where its kernels are those that the check will run
    return open_hugging_face(model)


def _refuse_unreal(folder: Path, parameters: set[str]) -> None:
    """Refuse parameters in integers or complex numbers, which transformers would convert."""
    from safetensors import safe_open

    kinds: dict[str, str] = {}
    for path in folder.glob("*.safetensors"):
        with safe_open(path, framework="pt") as file:
            kinds |= {name: file.get_slice(name).get_dtype() for name in file.keys()}  # noqa: SIM118
    for path in [] if kinds else folder.glob("pytorch_model*.bin"):
        content = torch.load(path, map_location="meta", weights_only=True)
        kinds |= {name: str(tensor.dtype) for name, tensor in content.items()}
    real = {"F64", "F32", "F16", "BF16", *map(str, DTYPES)}
    for name in sorted(parameters & kinds.keys()):
        if kinds[name] not in real:
            raise UserError(
                f"{folder} holds {name} as {kinds[name].removeprefix('torch.')}, and weights must "
                "be float16, bfloat16, float32 or float64: save the checkpoint in one of these"
            )
