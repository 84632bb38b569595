"""A small checkpoint in the published form, and documents to fine-tune it on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from longrnn.config import build_config
from longrnn.hf.layouts import LAYOUTS
from longrnn.models import RecurrentConfig, RecurrentLM
from tests.texts import TEXTS, trained_bpe

# As in the published checkpoints: the ids of the tokenizer, and those of the embedding.
IDS, PADDED_IDS = 50_277, 50_288
RATES = ("A_log", "dt_bias", "D")


def published_mamba2(folder: Path, *, d_model: int = 16) -> Path:
    """A Mamba-2 as `state-spaces/mamba2-*` has it, with a BPE tokenizer.

    Matrices in float16, the rates in float32, and an embedding with more rows than the tokenizer
    has ids.
    """
    sizes = {
        "vocab_size": PADDED_IDS,
        "d_model": d_model,
        "n_layers": 2,
        "residual_in_fp32": True,
        "mixer": {"kind": "mamba2", "d_state": 8, "head_dim": 8},
    }
    torch.manual_seed(0)
    model = RecurrentLM(build_config(RecurrentConfig, sizes))
    for name, parameter in model.named_parameters():
        if name.rpartition(".")[2] not in RATES:
            parameter.data = parameter.data.half()
    folder.mkdir(parents=True)
    LAYOUTS["native"].save(model, folder)
    config: dict[str, Any] = json.loads(LAYOUTS["native"].write(model))
    config |= {"vocab_size": IDS, "pad_vocab_size_multiple": 16}
    (folder / "config.json").write_text(json.dumps(config))
    _save_tokenizer(folder)
    return folder


def _save_tokenizer(folder: Path) -> None:
    """Writes a trained BPE tokenizer whose vocabulary has entries up to `IDS` that no text uses."""
    trained_bpe().save(folder)
    content = json.loads((folder / "tokenizer.json").read_text())
    vocabulary = content["model"]["vocab"]
    for number in range(len(vocabulary), IDS):
        vocabulary[f"<unused-{number}>"] = number
    (folder / "tokenizer.json").write_text(json.dumps(content))


def documents(folder: Path) -> Path:
    """A folder of texts of different lengths."""
    folder.mkdir()
    for text in TEXTS:
        (folder / Path(text).name).write_text(Path(text).read_text())
    return folder
