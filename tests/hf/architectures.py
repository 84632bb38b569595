"""Tiny random models of all Hugging Face architectures that can be built offline."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch

from tests.contracts.builders import stirred

VOCAB = 61
# Sizes under every name that configurations use; each configuration takes those it knows.
TINY: dict[str, Any] = {
    "vocab_size": VOCAB,
    "max_position_embeddings": 128,
    "n_positions": 128,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
    "sliding_window": 8,
    "attention_window_size": 8,
    "type_vocab_size": 2,
    **dict.fromkeys(
        ["hidden_size", "n_embd", "d_model", "dim", "embedding_size", "word_embed_proj_dim"], 32
    ),
    **dict.fromkeys(["attention_hidden_size", "lru_width", "mamba_d_ssm"], 32),
    **dict.fromkeys(["intermediate_size", "ffn_dim", "decoder_ffn_dim", "ffn_hidden_size"], 48),
    **dict.fromkeys(["encoder_ffn_dim"], 48),
    **dict.fromkeys(["num_hidden_layers", "n_layer", "n_layers", "decoder_layers"], 2),
    **dict.fromkeys(["encoder_layers", "linear_num_key_heads", "num_key_value_heads"], 2),
    **dict.fromkeys(["num_attention_heads", "n_head", "n_heads", "mamba_n_heads"], 4),
    **dict.fromkeys(["encoder_attention_heads", "decoder_attention_heads", "mamba_num_heads"], 4),
    **dict.fromkeys(["num_experts", "num_local_experts", "n_routed_experts"], 4),
    **dict.fromkeys(["linear_num_value_heads"], 4),
    **dict.fromkeys(["n_group", "n_groups", "topk_group", "first_k_dense_replace"], 1),
    **dict.fromkeys(["num_experts_per_tok"], 2),
    **dict.fromkeys(["moe_intermediate_size", "shared_expert_intermediate_size"], 16),
    **dict.fromkeys(["q_lora_rank", "kv_lora_rank"], 16),
    **dict.fromkeys(["head_dim", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"], 8),
    **dict.fromkeys(["linear_key_head_dim", "linear_value_head_dim", "mamba_d_head"], 8),
    **dict.fromkeys(["mamba_head_dim", "num_heads", "state_size", "ssm_state_size"], 8),
    **dict.fromkeys(["mamba_d_state"], 8),
}
MIXED = ["linear_attention", "full_attention", "linear_attention"]
DECODERS = ["bert", "bert-generation", "big_bird", "electra", "ernie", "megatron-bert"]
DECODERS += ["rembert", "roc_bert", "roformer"]
# Further options that an architecture needs.
MORE: dict[str, dict[str, Any]] = {
    "bamba": {"mamba_n_heads": 8, "attn_layer_indices": [1], "num_hidden_layers": 3},
    "codegen": {"rotary_dim": 8},
    "gptj": {"rotary_dim": 8},
    "gemma3n_text": {
        "vocab_size_per_layer_input": VOCAB,
        "hidden_size_per_layer_input": 8,
        "num_hidden_layers": 4,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "num_kv_shared_layers": 2,
        "intermediate_size": [48, 48, 64, 64],
        "activation_sparsity_pattern": [0.5, 0.0, 0.0, 0.0],
    },
    "gemma4_text": {
        "vocab_size_per_layer_input": VOCAB,
        "hidden_size_per_layer_input": 8,
        "global_head_dim": 16,
        "num_hidden_layers": 4,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "num_kv_shared_layers": 2,
    },
    "granitemoehybrid": {
        "mamba_n_heads": 8,
        "num_hidden_layers": 3,
        "layer_types": ["mamba", "attention", "mamba"],
    },
    "jamba": {
        "num_hidden_layers": 3,
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "mamba_dt_rank": 4,
    },
    "kimi_linear": {
        "num_hidden_layers": 3,
        "layer_types": MIXED,
        "linear_head_dim": 8,
        "linear_num_heads": 4,
        "num_experts_per_tok": 2,
    },
    "mamba2": {"n_groups": 2},
    "minimax": {"block_size": 16},
    "recurrent_gemma": {"num_hidden_layers": 3},
    "xlstm": {"hidden_size": 128, "num_heads": 2, "num_blocks": 2},
    "zamba2": {
        "num_hidden_layers": 4,
        "layer_types": ["mamba", "hybrid", "mamba", "hybrid"],
        "hybrid_layer_ids": [1, 3],
        "n_mamba_heads": 4,
        "mamba_headdim": 16,
        "mamba_ngroups": 2,
        "num_mem_blocks": 1,
        "num_key_value_heads": 4,
        "attention_hidden_size": 64,
        "attention_head_dim": 16,
        "adapter_rank": 4,
        "chunk_size": 16,
    },
    **{kind: {"is_decoder": True} for kind in DECODERS},
}


def names(text: str) -> list[str]:
    return text.split()


# One for each kind of cache, and the architectures with the most unusual caches.
FEW = names(
    """
    llama mistral gpt2 mamba falcon_h1 bamba jamba kimi_linear rembert
    """
)
MANY = names(
    """
    afmoe apertus arcee aria_text axk1 bart beam bert bert-generation big_bird bigbird_pegasus
    biogpt bitnet blenderbot blenderbot-small bloom codegen cohere cohere2 cohere2_moe ctrl
    deepseek_v3 diffllama doge electra ernie ernie4_5 ernie4_5_moe exaone4 exaone_moe falcon
    falcon_mamba flex_olmo gemma gemma2 gemma3_text gemma3n_text gemma4_text glm glm4 glm4_moe
    glm4_moe_lite gpt-sw3 gpt_bigcode gpt_neo gpt_neox gpt_neox_japanese gpt_oss gptj granite
    granitemoe granitemoehybrid granitemoeshared helium hy_v3 hyperclovax jais2 jetmoe lfm2
    llama4_text mamba2 marian mbart megatron-bert mimo_v2_flash minicpm3 minimax_m2 ministral3
    mixtral mpt mvp nanochat nemotron nemotron_h olmo olmo2 olmo3 olmo_hybrid olmoe opt pegasus
    persimmon phi phi3 phimoe plbart qwen2 qwen2_moe qwen3 qwen3_5_moe_text qwen3_5_text
    qwen3_moe qwen3_next roc_bert roformer seed_oss smollm3 solar_open stablelm starcoder2 trocr
    vaultgemma whisper xglm youtu zamba2
    """
)


def architecture(kind: str, **more: Any) -> Any:
    """Return a model with a few thousand nontrivial weights and layers of all its types.

    Args:
        kind: its `model_type`.
        more: options of its configuration.
    """
    from transformers import AutoModelForCausalLM
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    known = CONFIG_MAPPING[kind]().to_dict()
    # Use grouped keys and values where possible; latent attention does not support them.
    absent_too = ("num_key_value_heads", "sliding_window")
    options = {k: v for k, v in TINY.items() if known.get(k) is not None or k in absent_too}
    options = {k: v for k, v in options.items() if k in known}
    if "kv_lora_rank" in known:
        options["num_key_value_heads"] = TINY["num_attention_heads"]
    if known.get("layer_types"):
        types = list(dict.fromkeys(known["layer_types"]))
        options["num_hidden_layers"] = max(2, len(types))
        options["layer_types"] = (2 * types)[: options["num_hidden_layers"]]
    options |= MORE.get(kind, {}) | more
    with torch.random.fork_rng(), pytest.MonkeyPatch.context() as patch:
        # transformers would call the kernels of flash-linear-attention on a CPU too.
        patch.setitem(sys.modules, "fla", None)
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[kind](**options))
    return stirred(model.eval(), seed=1)
