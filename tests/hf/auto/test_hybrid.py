"""`LongRNNForCausalLM.of(hybrid)` is the Hugging Face model with padding, packing and states."""

from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from datasets import Dataset
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

from longrnn import load
from longrnn.errors import UserError
from longrnn.hf.auto import LongRNNForCausalLM
from longrnn.hf.hybrid.model import HybridLM
from longrnn.hf.tokenizer import byte_level
from tests.contracts.builders import assert_near
from tests.hf.auto.test_trainers import arguments
from tests.hf.foreign import architecture, tokens, with_bytes

SCALED = {"lm_head_multiplier": 0.5}
KINDS = {"falcon_h1": SCALED, "qwen3_next": {}, "recurrent_gemma": {}}
TEXT = tokens(2, 12) + 1


@pytest.fixture
def base(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    kind = getattr(request, "param", "falcon_h1")
    theirs = architecture(kind, vocab_size=256, **KINDS.get(kind, {}))
    return with_bytes(theirs, tmp_path / "base")


@torch.no_grad()
@pytest.mark.parametrize("base", KINDS, indirect=True)
def test_padding_packing_and_generation(base: Path) -> None:
    stock: Any = AutoModelForCausalLM.from_pretrained(base).eval()
    model: Any = LongRNNForCausalLM.from_pretrained(base)
    found, wanted = (each(TEXT, labels=TEXT, output_hidden_states=True) for each in (model, stock))
    assert_near(found.logits, wanted.logits, 1e-5)
    assert found.loss == pytest.approx(float(wanted.loss), rel=1e-5)
    assert_near(found.hidden_states[-1], wanted.hidden_states[-1], 1e-5)
    positions = torch.cat([torch.arange(5), torch.arange(7)])[None]
    assert_near(model(TEXT, position_ids=positions).logits[:, 5:], stock(TEXT[:, 5:]).logits, 1e-5)
    mask = torch.ones_like(TEXT)
    mask[1, :5] = 0
    how = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    both = model.generate(TEXT, attention_mask=mask, **how)
    for row, text in enumerate((TEXT[:1], TEXT[1:, 5:])):
        alone = stock.generate(text, attention_mask=torch.ones_like(text), **how)
        assert torch.equal(both[row, 12:], alone[0, text.shape[1] :])
    begun = model(TEXT[:, :5]).past_key_values.state
    assert_near(model(TEXT[:, 5:], state=begun).logits, wanted.logits[:, 5:], 1e-5)


@pytest.mark.parametrize("size", [200, 300])
def test_the_vocabulary_can_be_resized(size: int, base: Path) -> None:
    model: Any = LongRNNForCausalLM.from_pretrained(base)
    model.resize_token_embeddings(size)
    with torch.no_grad():
        assert model(torch.tensor([[size - 1]])).logits.shape[-1] == size
    with pytest.raises(UserError, match=str(size)):
        model(torch.tensor([[size]]))


def test_it_is_trained_and_saved(base: Path, tmp_path: Path) -> None:
    """By Trainer, with recomputation; the result records mitigation and window of attention."""
    hybrid = load(f"{base}+attention_window(window=8)+state_norm(threshold=9)")
    assert isinstance(hybrid, HybridLM)
    model = LongRNNForCausalLM.of(hybrid)
    data = Dataset.from_dict({"input_ids": TEXT.tolist(), "labels": TEXT.tolist()})
    options = arguments(tmp_path / "out", max_steps=2, gradient_checkpointing=True)
    Trainer(model=model, args=TrainingArguments(**options), train_dataset=data).train()
    model.save_pretrained(tmp_path / "saved")
    again: Any = load(tmp_path / "saved")
    assert again.spec == hybrid.spec
    stock: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "saved").eval()
    with torch.no_grad():
        assert_near(again(TEXT).logits, model.eval()(TEXT).logits, 1e-6)
        short = TEXT[:, :8]
        assert_near(stock(short).logits, load(f"{tmp_path / 'saved'}+none")(short).logits, 1e-5)


@pytest.mark.parametrize(
    ("base", "targets"),
    [("falcon_h1", ["in_proj", "q_proj"]), ("qwen3_next", "all-linear")],
    indirect=["base"],
)
def test_adapters_of_peft_go_both_ways(base: Path, targets: Any, tmp_path: Path) -> None:
    """Made on a hybrid, also of experts, they open on the Hugging Face model, and merge here."""
    config = peft.LoraConfig(r=2, target_modules=targets, init_lora_weights=False)
    model: Any = peft.get_peft_model(LongRNNForCausalLM.from_pretrained(base), config)
    model.eval().save_pretrained(tmp_path / "adapter")
    plain: Any = AutoModelForCausalLM.from_pretrained(base)
    stock: Any = peft.PeftModel.from_pretrained(plain, tmp_path / "adapter").eval()
    with torch.no_grad():
        wanted = stock(TEXT).logits
        assert_near(model(TEXT).logits, wanted, 1e-5)
        assert_near(load(tmp_path / "adapter")(TEXT).logits, wanted, 1e-5)


@pytest.mark.parametrize("base", ["falcon_h1", "recurrent_gemma"], indirect=True)
def test_sft_of_trl_has_the_loss_of_the_model(base: Path, tmp_path: Path) -> None:
    """Also where logits are multiplied by a number, or limited."""
    trl = pytest.importorskip("trl")
    tokenizer = byte_level().tokenizer
    tokenizer.add_special_tokens({"eos_token": chr(0x100), "pad_token": chr(0x100)})
    data = Dataset.from_dict({"prompt": ["one ", "two "], "completion": ["a", "bb"]})
    model: Any = LongRNNForCausalLM.from_pretrained(base)
    trainer = trl.SFTTrainer(
        model=model,
        args=trl.SFTConfig(**arguments(tmp_path / "out", max_steps=1, bf16=False)),
        train_dataset=data,
        processing_class=tokenizer,
    )
    wanted = float(model(**next(iter(trainer.get_train_dataloader()))).loss)
    trainer.train()
    assert trainer.state.log_history[0]["loss"] == pytest.approx(wanted, rel=1e-4)


@pytest.mark.parametrize("base", ["qwen3_next", "nemotron_h"], indirect=True)
def test_the_trainer_goes_on_from_the_weights_of_its_checkpoint(base: Path, tmp_path: Path) -> None:
    data = Dataset.from_dict({"input_ids": TEXT.tolist(), "labels": TEXT.tolist()})
    options = arguments(tmp_path, max_steps=1, save_strategy="steps", save_steps=1)
    ends = []
    for begin in (None, str(tmp_path / "checkpoint-1")):
        model: Any = LongRNNForCausalLM.from_pretrained(base)
        trainer = Trainer(model=model, args=TrainingArguments(**options), train_dataset=data)
        trainer.train(resume_from_checkpoint=begin)
        ends.append(model.state_dict())
    torch.testing.assert_close(ends[1], ends[0], rtol=0, atol=0)
    stored = load_file(tmp_path / "checkpoint-1" / "model.safetensors")
    stored.popitem()
    with pytest.raises(UserError, match="from_pretrained"):
        model.load_state_dict(stored, strict=False)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("device_map", {"": "disk"}),
        ("output_loading_info", True),
        ("quantization_config", {"load_in_4bit": True}),
        ("attn_implementatoin", "eager"),
    ],
)
def test_an_argument_of_from_pretrained_is_followed_or_refused(
    name: str, value: Any, base: Path
) -> None:
    with pytest.raises(UserError, match=value[""] if name == "device_map" else name):
        LongRNNForCausalLM.from_pretrained(base, **{name: value})
    inside = {"subfolder": base.name, "attn_implementation": "eager"}
    model: Any = LongRNNForCausalLM.from_pretrained(base.parent, **inside)
    assert model.config._attn_implementation == "eager"
    with torch.no_grad():
        assert_near(model(TEXT).logits, load(base)(TEXT).logits, 1e-5)


def test_a_hybrid_of_the_hub_is_fetched_with_the_given_token_and_cache(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fetched: list[dict[str, Any]] = []

    def snapshot_download(name: str, **options: Any) -> str:
        fetched.append({"name": name, **options})
        return str(base)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    where = {"token": "secret", "cache_dir": tmp_path / "cache"}
    model = LongRNNForCausalLM.from_pretrained("organisation/falcon", **where, revision="v1")
    assert isinstance(model.language_model, HybridLM)
    wanted = {"name": "organisation/falcon", "revision": "v1", **where}
    assert all(call.items() >= wanted.items() for call in fetched)
    assert fetched
