"""Makes a hybrid ready for training, and writes one as a checkpoint of its own architecture."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from longrnn.checksums import remove_checksums, write_checksums
from longrnn.errors import UserError
from longrnn.files import new_folder, partial_path, remove, sync_folder
from longrnn.hf.foreign import MITIGATION_KEY
from longrnn.hf.foreign_load import quietly
from longrnn.hf.hybrid.model import HybridLM
from longrnn.hf.tokenizer import HFTokenizer, byte_level
from longrnn.programs import reason_of
from longrnn.text import Tokenizer

# What `HybridLM` puts in front of the names of weights.
WEIGHTS_PREFIX = "model."


def trainable(model: HybridLM) -> HybridLM:
    """Returns a hybrid under the same mitigation in float32, whose gradients can be computed.

    Args:
        model: its weights are cast in place.

    Raises:
        UserError: quantized weights, or gradients that torch cannot compute.
    """
    quantized = [name for name, w in model.named_parameters() if not w.is_floating_point()]
    if quantized or getattr(model.model.config, "quantization_config", None):
        raise UserError(
            f"this {model.kind} has quantized weights, which cannot be trained: give the "
            "checkpoint with weights in bfloat16 or float32"
        )
    start = model.start
    model = HybridLM(model.model.float()).under(model.mitigation).starting_from(start)
    tokens = torch.arange(8).view(2, 4) % model.vocab_size
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    try:
        first = model(tokens)
        second = model(tokens, first.state)
        loss = first.logits.sum() + second.logits.sum()
        # Some are never used, such as adapters of a Zamba2 that belong to another layer.
        gradients = torch.autograd.grad(loss, weights, allow_unused=True)
        unused = {w for w, grad in zip(weights, gradients, strict=True) if grad is None}
        if any(weight in unused for cell in model.cells for weight in cell.parameters()):
            raise RuntimeError("none reaches a recurrent layer")
    except RuntimeError as error:  # NotImplementedError too; a lack of memory is raised as it is
        raise UserError(
            f"this {model.kind} cannot be trained here, because its gradients cannot be "
            f"computed ({reason_of(error)}): train it with the Trainer of Hugging Face, or train "
            "another model"
        ) from error
    model.has_unused_weights = bool(unused)
    return model


def write_hybrid(model: HybridLM, folder: Path, mitigation: str | None, **options: Any) -> None:
    """Writes a hybrid as transformers does, with the mitigation in its configuration."""
    setattr(model.model.config, MITIGATION_KEY, mitigation)
    with quietly():
        model.model.save_pretrained(folder, **options)


def save_hybrid(
    model: HybridLM,
    folder: Path,
    weights: Mapping[str, Tensor],
    tokenizer: Tokenizer,
    mitigation: str | None,
) -> None:
    """Writes a checkpoint that transformers reads as one of the model's own architecture.

    Each file appears complete.

    Args:
        model: the model.
        folder: created if it does not exist.
        weights: the whole state dict of the model.
        tokenizer: of the model.
        mitigation: the spec under which the model was trained, with its window of attention.
    """
    named = {
        name.removeprefix(WEIGHTS_PREFIX): weight.contiguous() for name, weight in weights.items()
    }
    draft = partial_path(folder / "model")
    new_folder(draft)
    try:
        write_hybrid(model, draft, mitigation, state_dict=named)
        whole = tokenizer if isinstance(tokenizer, HFTokenizer) else byte_level()
        whole.save(draft)
        remove_checksums(folder)
        # By their configuration, `linearize` knows that all of them are there.
        for path in sorted(draft.iterdir(), key=lambda path: path.name == "config.json"):
            with path.open("rb") as file:
                os.fsync(file.fileno())
            os.replace(path, folder / path.name)
    finally:
        remove(draft)
    sync_folder(folder)
    write_checksums(folder)
