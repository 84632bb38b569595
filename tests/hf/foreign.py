"""Tiny random models of Hugging Face architectures, and checkpoints as mamba-ssm writes them."""

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import Tensor

from longrnn import mitigation
from longrnn import state as states
from longrnn.checkpoints.layouts import LAYOUTS
from longrnn.hf.tokenizer import byte_level
from longrnn.models import RecurrentLM
from tests.contracts.builders import assert_near, assert_trees_equal, build_model, stirred
from tests.contracts.subjects import read
from tests.texts import DATA

# Names, sizes and options of the architectures.
TABLES = yaml.safe_load((DATA / "architectures.yaml").read_text())
SIZES, MORE = TABLES["sizes"], TABLES["more"]
FEW, REFUSED = TABLES["few"].split(), TABLES["refused"].split()
KINDS = sorted({*FEW, *REFUSED, *TABLES["many"].split()})
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


def causal(kind: str, dtype: torch.dtype = torch.float32, **options: Any) -> Any:
    """Return a Hugging Face model with random, nontrivial weights."""
    return architecture(kind, **options).to(dtype)


def hybrid(theirs: Any) -> Any:
    """Return the model with our cells of a Hugging Face hybrid."""
    from longrnn.hf.foreign_load import open_hugging_face
    from longrnn.hf.hybrid.model import HybridLM

    model = open_hugging_face(theirs)
    assert isinstance(model, HybridLM)
    return model


@torch.no_grad()
def in_one_call(theirs: Any, text: Tensor) -> Tensor:
    """Return the logits of transformers without a cache."""
    return theirs(input_ids=text, use_cache=False).logits


def tokens(rows: int, time: int, seed: int = 0) -> Tensor:
    return torch.randint(VOCAB, (rows, time), generator=torch.Generator().manual_seed(seed))


def assert_continues(model: Any, text: Tensor, expected: Tensor, tolerance: float) -> None:
    """Pieces, reused forks and rows of different lengths give the logits of one call, `(2, t, v)`,
    and no call changes a state."""
    found, _ = read(model, text, None, [3, 1, 15, text.shape[1] - 19])
    assert_near(found, expected, tolerance)
    short, long = model(text[:1, :9], keep=0).state, model(text[1:, :20], keep=0).state
    rows = [0, 1, 1, 0]  # sorting them by length and undoing this are two orders
    both = states.take(states.join([short, long]), rows)
    follow = torch.stack([text[0, 9:19], text[1, 20:30]])[rows]
    wanted = torch.stack([expected[0, 9:19], expected[1, 20:30]])[rows]
    for given, ids, logits in ((both, follow, wanted), (short, follow[:1], wanted[:1])):
        before = states.clone(given)
        for _ in range(2):
            assert_near(model(ids, given).logits, logits, tolerance)
        assert_trees_equal(given, before)


MAMBA = {"kind": "mamba", "d_state": 6, "expand": 4}
MAMBA2 = {"kind": "mamba2", "d_state": 6, "head_dim": 4}
# The `ssm_cfg` of mamba-ssm for these; that of published Mamba-1 names no layer.
SSM_CFG = {
    "mamba": {"d_state": 6, "expand": 4, "dt_rank": "auto"},
    "mamba2": {"layer": "Mamba2", "d_state": 6, "headdim": 4},
}


def native(
    folder: Path,
    dtype: torch.dtype = torch.float32,
    mixer: Any = MAMBA2,
    *,
    ids: int = 19,
    pad: int = 8,
    **config: Any,
) -> RecurrentLM:
    """Write a checkpoint in the format of mamba-ssm, with more rows than ids; return its model."""
    model = build_model(mixer, vocab_size=-(-ids // pad) * pad, dtype=dtype, **config).eval()
    folder.mkdir()
    LAYOUTS["native"].save(model, folder)
    content = {
        "d_model": model.config.d_model,
        "d_intermediate": 0,
        "n_layer": model.config.n_layers,
        "vocab_size": ids,
        "ssm_cfg": SSM_CFG[mixer["kind"]],
        "attn_layer_idx": [],
        "attn_cfg": {},
        "rms_norm": True,
        "fused_add_norm": True,
        "pad_vocab_size_multiple": pad,
        "tie_embeddings": model.config.tie_embeddings,
    }
    (folder / "config.json").write_text(json.dumps(content))
    return model


def with_bytes(model: Any, folder: Path) -> Path:
    """Write a Hugging Face model together with a tokenizer of bytes."""
    model.save_pretrained(folder)
    byte_level().save(folder)
    return folder


def build_auto(mixer: str | dict[str, Any] = "mamba2", *, seed: int = 0, **options: Any) -> Any:
    """A model with the weights of `build_model`; `config` options of `LongRNNConfig` in `auto`."""
    from longrnn.hf.auto import LongRNNConfig, LongRNNForCausalLM

    auto = options.pop("auto", {})
    if auto.get("mitigation") is not None:
        auto = auto | {"mitigation": str(mitigation(auto["mitigation"]))}
    own = build_model(mixer, dtype=options.pop("dtype", torch.float32), seed=seed, **options)
    model: Any = LongRNNForCausalLM(LongRNNConfig(**asdict(own.config), **auto))
    model.to(own.embedding.weight.dtype)
    model.model.load_state_dict(own.state_dict())
    return model.eval()
