"""Adapters that PEFT and transformers saved: `load` merges them, or says why it cannot."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from longrnn import load, mitigation, state
from longrnn.checkpoints import adapters as lora
from longrnn.checkpoints.layouts import save_model
from longrnn.checkpoints.names import ADAPTER, INITIAL_STATE
from longrnn.checkpoints.names import ADAPTER_WEIGHTS as WEIGHTS
from longrnn.checksums import remove_checksums
from longrnn.errors import UserError
from longrnn.hf.auto import LongRNNForCausalLM
from tests.contracts.builders import assert_near, assert_trees_equal, random_tokens
from tests.hf.foreign import build_auto, causal

peft = pytest.importorskip("peft")
TOKENS, WINDOW = random_tokens(2, 9), "sliding_window(window=3)"


@pytest.fixture
def base(tmp_path: Path) -> Path:
    auto = {"tokenizer": "bytes", "mitigation": WINDOW}
    build_auto("mamba2", auto=auto).save_pretrained(tmp_path / "base")
    return tmp_path / "base"


def options(**more: Any) -> Any:
    """One of the adapters changes the head, which shares its weights with the embedding."""
    # The factor B would be 0 otherwise, and an adapter that is ignored would go unnoticed.
    known = {"r": 2, "target_modules": ["in_proj", "head"], "init_lora_weights": False}
    return peft.LoraConfig(**known | more)


def save_with_peft(base: Path, folder: Path, config: Any = None, **more: Any) -> torch.Tensor:
    model = LongRNNForCausalLM.from_pretrained(base)
    config = config or options(task_type="CAUSAL_LM", **more)
    model = peft.get_peft_model(model, config).eval()
    with torch.no_grad():
        for one in model.parameters():
            one += 0.1 * one.requires_grad
    model.save_pretrained(folder)
    return model(TOKENS).logits


def save_with_transformers(base: Path, folder: Path) -> torch.Tensor:
    model = LongRNNForCausalLM.from_pretrained(base)
    model.add_adapter(options())
    model.save_pretrained(folder)
    return model.eval()(TOKENS).logits


# PEFT copies a head that is trained as a whole, which is then no longer the embedding.
WHOLE = {"target_modules": ["in_proj"], "modules_to_save": ["head"]}
save_whole_head = partial(save_with_peft, **WHOLE)


# transformers computes the first one wrong, and cannot add the second.
save_dora = partial(save_with_peft, use_dora=True, target_modules=["in_proj"])
VERA = {"target_modules": ["out_proj"], "task_type": "CAUSAL_LM"}
save_vera = partial(save_with_peft, config=peft.VeraConfig(**VERA))
save_rows = partial(save_with_peft, trainable_token_indices=[1, 2], target_modules=["in_proj"])


def save_plain(base: Path, folder: Path) -> torch.Tensor:
    model = peft.get_peft_model(load(base), options()).eval()
    model.peft_config["default"].base_model_name_or_path = str(base)
    model.save_pretrained(folder, save_embedding_layers=False)
    return model(TOKENS).logits


@pytest.mark.parametrize(
    "save",
    [
        save_with_peft, save_with_transformers, save_plain, save_whole_head, save_dora, save_vera,
        save_rows,
    ],
)  # fmt: skip
def test_an_adapter_is_merged_however_it_was_saved(save: Any, base: Path, tmp_path: Path) -> None:
    """Of the Auto class and of the model that it holds."""
    folder = tmp_path / "adapter"
    wanted = save(base, folder)
    merged: Any = load(folder)
    assert_near(merged(TOKENS).logits, wanted, 1e-5)
    if save is not save_plain:
        auto = AutoModelForCausalLM.from_pretrained(folder)
        assert_near(auto(TOKENS).logits, wanted, 1e-5)
    save_model(merged, tmp_path / "merged")  # the head is no longer the embedding
    assert_near(load(tmp_path / "merged")(TOKENS).logits, wanted, 1e-5)


@torch.no_grad()
@pytest.mark.parametrize("targets", [["in_proj", "q_proj"], r".*\.0\..*(in_proj|q_proj)"], ids=str)
@pytest.mark.parametrize("kind", ["mamba2", "llama", "bamba", "falcon_h1"])
def test_an_adapter_of_a_model_of_transformers_is_merged(
    kind: str, targets: Any, tmp_path: Path
) -> None:
    """With the names of weights there, into all kinds of model; a dtype is that of the result."""
    theirs = causal(kind, tie_word_embeddings=kind == "mamba2")
    theirs.save_pretrained(tmp_path / "base")
    whole = [] if kind == "llama" else ["lm_head"]
    config = options(target_modules=targets, task_type="CAUSAL_LM", modules_to_save=whole)
    model = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(tmp_path / "base"), config)
    for weight in model.parameters():
        weight += 0.1 * weight.requires_grad
    model.save_pretrained(tmp_path / "adapter")
    merged: Any = load(tmp_path / "adapter")
    assert type(merged) is type(load(tmp_path / "base"))
    tokens = TOKENS % theirs.config.vocab_size
    assert_near(merged(tokens).logits, model.eval()(tokens, use_cache=False).logits, 1e-5)
    narrow: Any = load(tmp_path / "adapter", dtype=torch.bfloat16)
    assert narrow(tokens).logits.dtype == torch.bfloat16
    assert {cell.get_parameter("A_log").dtype for cell in narrow.cells} <= {torch.float32}


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("kind", ["llama", "recurrent_gemma", "falcon_h1"])
def test_an_idle_adapter_changes_nothing_in_any_dtype(
    kind: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    causal(kind).save_pretrained(tmp_path / "base")
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    config = options(target_modules=["q_proj"], init_lora_weights=True)
    peft.get_peft_model(base, config).save_pretrained(tmp_path / "adapter")
    text = random_tokens(1, 40) % base.config.vocab_size
    found, wanted = (load(tmp_path / name, dtype=dtype)(text) for name in ("adapter", "base"))
    assert torch.equal(found.logits, wanted.logits)


@torch.no_grad()
@pytest.mark.parametrize("kind", ["llama", "falcon_h1", "mamba2"])
def test_trained_rows_of_a_tied_embedding_are_those_of_the_head_too(
    kind: str, tmp_path: Path
) -> None:
    causal(kind, tie_word_embeddings=True).save_pretrained(tmp_path / "base")
    for auto in (AutoModelForCausalLM, LongRNNForCausalLM)[: 1 if kind == "llama" else 2]:
        model = auto.from_pretrained(tmp_path / "base")
        table = model.get_input_embeddings()
        name = next(name for name, module in model.named_modules() if module is table)
        rows = {name.rsplit(".", 1)[-1]: [1, 2]}
        config = options(target_modules=["in_proj", "q_proj"], trainable_token_indices=rows)
        adapted = peft.get_peft_model(model, config).eval()
        for weight in adapted.parameters():
            weight += 0.1 * torch.randn_like(weight) * weight.requires_grad
        adapted.save_pretrained(tmp_path / "adapter")
        wanted = adapted(TOKENS, use_cache=False).logits
        assert_near(load(tmp_path / "adapter")(TOKENS).logits, wanted, 1e-5)
        alone = adapted.merge_and_unload()
        assert_near(alone(TOKENS, use_cache=False).logits, wanted, 1e-5)


def test_an_adapter_without_a_record_keeps_mitigation_and_start_of_a_hybrid(tmp_path: Path) -> None:
    theirs: Any = causal("bamba")
    theirs.config.longrnn_mitigation = "state_norm(threshold=20.0)"
    theirs.save_pretrained(tmp_path / "base")
    start = load(tmp_path / "base")(TOKENS[:1]).state
    state.save(start, tmp_path / "base" / INITIAL_STATE)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    config = options(target_modules=["q_proj"], task_type="CAUSAL_LM")
    peft.get_peft_model(theirs, config).save_pretrained(tmp_path / "adapter")
    merged = load(tmp_path / "adapter")
    assert str(merged.mitigation) == "state_norm(threshold=20.0)"
    assert_trees_equal(merged.start, start)


def test_an_adapter_of_longrnn_is_merged_by_transformers_too(base: Path, tmp_path: Path) -> None:
    """With its mitigation and the parameters that were trained as a whole; it can be saved."""
    model: Any = load(f"{base}+none")
    whole = ["A_log", "embedding"]  # the tied head has an adapter, and is trained as a whole too
    lora.add_adapters(model, r=2, targets=["in_proj", "head"], full=whole)
    with torch.no_grad():
        for one in model.parameters():
            one += 0.1 * one.requires_grad
    model.base_name, model.trained_under = str(base), WINDOW
    lora.save_adapter(model, tmp_path / "adapter", model.state_dict())
    wanted = model.under(mitigation(WINDOW))(TOKENS).logits
    for name in ("adapter", "saved"):
        narrow = AutoModelForCausalLM.from_pretrained(tmp_path / name, dtype="bfloat16")
        assert narrow.model.embedding.weight.dtype == torch.bfloat16
        auto = AutoModelForCausalLM.from_pretrained(tmp_path / name, dtype="auto")
        assert_near(auto(TOKENS).logits, wanted, 1e-5)
        assert_near(load(tmp_path / name)(TOKENS).logits, wanted, 1e-5)
        for device_map in ("meta", {"": "meta"}):
            elsewhere = AutoModelForCausalLM.from_pretrained(tmp_path / name, device_map=device_map)
            assert elsewhere.device.type == "meta"
        auto.save_pretrained(tmp_path / "saved")
    build_auto("mamba2", seed=1).save_pretrained(base)
    with pytest.raises(UserError, match="weights"):
        load(tmp_path / "adapter")


def changed(change: Any) -> Any:
    def damage(folder: Path) -> None:
        found = map(change, load_file(folder / WEIGHTS).items())
        save_file(dict(filter(None, found)), folder / WEIGHTS)

    return damage


def name_itself(folder: Path) -> None:
    (folder / ADAPTER).write_text(json.dumps({"base_model_name_or_path": str(folder)}))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda folder: (folder / WEIGHTS).unlink(), WEIGHTS),
        (lambda folder: (folder / WEIGHTS).write_bytes(b"cut"), None),
        (changed(lambda one: None if "lora_B" in one[0] else one), "lora_B"),
        (changed(lambda one: (one[0].replace("head", "lm_head"), one[1])), "lm_head"),
        (name_itself, "base_model_name_or_path"),
    ],
)
def test_an_adapter_that_does_not_fit_is_refused(
    damage: Any, message: str | None, base: Path, tmp_path: Path
) -> None:
    """PEFT warns of some of these, and computes with parameters as they were drawn."""
    folder = tmp_path / "adapter"
    save_with_transformers(base, folder)
    remove_checksums(folder)
    damage(folder)
    with pytest.raises(UserError, match=message):
        load(folder)


def test_an_adapter_without_weights_to_merge_is_refused(base: Path, tmp_path: Path) -> None:
    """Learned prompts work with PEFT, which gives them to the model as embeddings."""
    sizes = {"num_virtual_tokens": 3, "num_layers": 2, "token_dim": 8, "num_attention_heads": 1}
    options = peft.PromptTuningConfig(task_type="CAUSAL_LM", **sizes)
    model = peft.get_peft_model(LongRNNForCausalLM.from_pretrained(base), options)
    model.save_pretrained(tmp_path / "prompt")
    with pytest.raises(UserError, match="prompt"):
        load(tmp_path / "prompt")
