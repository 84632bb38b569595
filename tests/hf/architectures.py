"""Tiny random models of all Hugging Face architectures that can be built offline."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
import yaml

from tests.contracts.builders import stirred
from tests.texts import DATA

# Names, sizes and options of the architectures.
TABLES = yaml.safe_load((DATA / "architectures.yaml").read_text())
SIZES, MORE = TABLES["sizes"], TABLES["more"]
FEW, MANY = TABLES["few"].split(), TABLES["many"].split()
VOCAB = SIZES["vocab_size"]


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
    options = {k: v for k, v in SIZES.items() if known.get(k) is not None or k in absent_too}
    options = {k: v for k, v in options.items() if k in known}
    if "kv_lora_rank" in known:
        options["num_key_value_heads"] = SIZES["num_attention_heads"]
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
