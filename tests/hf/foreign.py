"""Tiny checkpoints in the formats of transformers and mamba-ssm."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from longrnn.hf.layouts import LAYOUTS
from longrnn.hf.tokenizer import byte_level
from longrnn.models import RecurrentLM
from tests.contracts.builders import build_model, stirred

VOCAB = 61
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
WINDOW = {"sliding_window": 8}
SHORT: dict[str, Any] = {"vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 2}
# All kinds of cache layers: growing keys, sliding windows, recurrent states, and mixtures.
KINDS: dict[str, dict[str, Any]] = {
    "llama": SIZES,
    "gpt_neox": {key: value for key, value in SIZES.items() if key != "num_key_value_heads"},
    "mistral": {**SIZES, **WINDOW},
    "qwen2": {**SIZES, **WINDOW, "use_sliding_window": True, "max_window_layers": 1},
    "gemma2": {**SIZES, **WINDOW, "head_dim": 8},
    "gpt2": {"vocab_size": VOCAB, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128},
    "rwkv": {**SHORT, "attention_hidden_size": 32, "num_hidden_layers": 7},
    "mamba": {**SHORT, "state_size": 4},
    "falcon_h1": {
        **SIZES,
        "mamba_d_ssm": 32,
        "mamba_n_heads": 4,
        "mamba_d_head": 8,
        "mamba_d_state": 8,
        "mamba_chunk_size": 16,
    },
}
MAMBA2: dict[str, Any] = {**SHORT, "state_size": 8, "head_dim": 8, "num_heads": 8, "n_groups": 2}


def causal(kind: str, dtype: torch.dtype = torch.float32, **options: Any) -> Any:
    """Return a Hugging Face model with random, nontrivial weights."""
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes = MAMBA2 if kind == "mamba2" else KINDS.get(kind, SIZES)
    config = AutoConfig.for_model(kind, **{**sizes, **options})
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config)
    return stirred(model.eval(), seed=1).to(dtype)


def tokens(rows: int, time: int, seed: int = 0) -> Tensor:
    return torch.randint(VOCAB, (rows, time), generator=torch.Generator().manual_seed(seed))


def native(folder: Path, dtype: torch.dtype = torch.float32, **config: Any) -> RecurrentLM:
    """Write a checkpoint in the format of mamba-ssm, and return its model."""
    model = build_model(
        {"kind": "mamba2", "d_state": 6, "head_dim": 4}, vocab_size=24, dtype=dtype, **config
    ).eval()
    folder.mkdir()
    LAYOUTS["native"].save(model, folder)
    content = {
        "d_model": model.config.d_model,
        "d_intermediate": 0,
        "n_layer": model.config.n_layers,
        "vocab_size": 19,
        "ssm_cfg": {"layer": "Mamba2", "d_state": 6, "headdim": 4},
        "attn_layer_idx": [],
        "attn_cfg": {},
        "rms_norm": True,
        "residual_in_fp32": True,
        "fused_add_norm": True,
        "pad_vocab_size_multiple": 8,
        "tie_embeddings": model.config.tie_embeddings,
    }
    (folder / "config.json").write_text(json.dumps(content))
    return model


def with_bytes(model: Any, folder: Path) -> Path:
    """Write a Hugging Face model together with a tokenizer of bytes."""
    model.save_pretrained(folder)
    byte_level().save(folder)
    return folder
