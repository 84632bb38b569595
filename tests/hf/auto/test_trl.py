"""Trainers of TRL start from a folder, and methods of PEFT reach what they train."""

import itertools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import trl
from datasets import Dataset
from torch import Tensor

from longrnn import load
from longrnn.errors import UserError
from longrnn.hf.tokenizer import byte_level
from tests.contracts.builders import assert_near, random_tokens
from tests.hf.auto.test_trainers import arguments
from tests.hf.foreign import build_auto

WINDOW = "sliding_window(window=3)"
PROJECTIONS = ["in_proj", "out_proj"]
PAIRS = {"prompt": ["one ", "two "], "chosen": ["a", "bb"], "rejected": ["cc", "d"]}
ANSWERS = {"prompt": PAIRS["prompt"], "completion": PAIRS["chosen"]}


def of_letters(completions: list[str], **_: Any) -> list[float]:
    return [float(sum(map(ord, text))) for text in completions]


SAMPLED = {"num_generations": 2, "max_completion_length": 4, "beta": 0.1}
REWARD = {"reward_funcs": of_letters}
# Trainer, options of its configuration, arguments, examples, and a metric of the first step with
# its value, which it has if and only if the reference model is the model before its first step.
TRAINERS: dict[str, tuple[str, dict[str, Any], dict[str, Any], dict[str, Any], str, float]] = {
    "sft": ("SFT", {}, {}, ANSWERS, "epoch", 1.0),
    "dpo": ("DPO", {}, {}, PAIRS, "loss", math.log(2)),
    "kto": ("KTO", {}, {}, ANSWERS | {"label": [True, False]}, "kl", 0.0),
    "grpo": ("GRPO", SAMPLED, REWARD, {"prompt": PAIRS["prompt"]}, "kl", 0.0),
    "rloo": ("RLOO", SAMPLED, REWARD, {"prompt": PAIRS["prompt"]}, "kl", 0.0),
}


def saved(mitigation: str | None, folder: Path) -> Path:
    """Save a model with its tokenizer, and return its folder."""
    tokenizer = byte_level().tokenizer
    tokenizer.add_special_tokens({"eos_token": "<eos>", "pad_token": "<pad>"})
    tokenizer.save_pretrained(folder)
    build_auto(vocab_size=260, auto={"mitigation": mitigation}).save_pretrained(folder)
    return folder


def first_step(name: str, model: Any, output: Path, **more: Any) -> tuple[Any, dict[str, float]]:
    """Return a trainer after one step, and what it logged."""
    kind, options, given, examples, _, _ = TRAINERS[name]
    config = getattr(trl, f"{kind}Config")(**arguments(output, max_steps=1, **options))
    data = Dataset.from_dict(examples)
    trainer = getattr(trl, f"{kind}Trainer")(
        model=model, args=config, train_dataset=data, **given, **more
    )
    trainer.train()
    assert not torch.is_autocast_enabled("cpu")
    return trainer, trainer.state.log_history[0]


@pytest.mark.parametrize(
    ("name", "adapter", "mitigation"),
    [
        # KTO has a reference model like DPO, and RLOO samples like GRPO.
        *((name, False, None) for name in ("sft", "dpo", "grpo")),
        ("dpo", True, None),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in itertools.product(TRAINERS, (False, True), (None, WINDOW))
        ),
    ],
)
def test_a_trainer_takes_a_step_from_a_folder(
    name: str, adapter: bool, mitigation: str | None, tmp_path: Path
) -> None:
    more, folder = {}, saved(mitigation, tmp_path / "model")
    if adapter:
        more["peft_config"] = peft.LoraConfig(target_modules=PROJECTIONS, task_type="CAUSAL_LM")
    trainer, logged = first_step(name, str(folder), tmp_path / "run", **more)
    *_, metric, wanted = TRAINERS[name]
    assert logged[metric] == pytest.approx(wanted, abs=1e-6)
    assert logged["grad_norm"] > 0
    trainer.save_model(str(tmp_path / "tuned"))
    before, after = load(folder), load(tmp_path / "tuned")
    moved = {
        name.rpartition(".")[0].rpartition(".")[2]
        for (name, old), new in zip(before.named_parameters(), after.parameters(), strict=True)
        if not torch.equal(old, new)
    }
    assert moved == set(PROJECTIONS) if adapter else moved > set(PROJECTIONS)


def loss(model: Any, tokens: Tensor) -> Tensor:
    return model(input_ids=tokens, labels=tokens).loss


METHODS: dict[str, Callable[..., peft.PeftConfig]] = {
    "prompt tuning": lambda **_: peft.PromptTuningConfig(num_virtual_tokens=3),
    "p-tuning": lambda **_: peft.PromptEncoderConfig(num_virtual_tokens=3, encoder_hidden_size=8),
    "LoRA": lambda **named: peft.LoraConfig(**named),
    "DoRA": lambda **named: peft.LoraConfig(use_dora=True, **named),
    "LoRA of the embedding": lambda **_: peft.LoraConfig(target_modules=["embedding"]),
    "AdaLoRA": lambda **named: peft.AdaLoraConfig(total_step=10, **named),
    "LoHa": lambda **named: peft.LoHaConfig(**named),
    "LoKr": lambda **named: peft.LoKrConfig(**named),
    "VeRA": lambda **named: peft.VeraConfig(target_modules=["out_proj"]),
    "OFT": lambda **named: peft.OFTConfig(oft_block_size=4, r=0, **named),
    "IA3": lambda **named: peft.IA3Config(feedforward_modules=["out_proj"], **named),
}


@pytest.mark.parametrize("name", METHODS)
def test_a_method_of_peft_trains_all_its_parameters_and_is_loaded_again(
    name: str, tmp_path: Path
) -> None:
    config = METHODS[name](target_modules=PROJECTIONS)
    config.task_type = "CAUSAL_LM"
    model, tokens = peft.get_peft_model(build_auto(), config), random_tokens(2, 7)
    trained = {name: one for name, one in model.named_parameters() if one.requires_grad}
    with torch.no_grad():
        for one in trained.values():
            one.add_(torch.full_like(one, 0.1))
    loss(model, tokens).backward()
    assert [name for name, one in trained.items() if one.grad is None or not one.grad.any()] == []
    assert not torch.allclose(loss(model, tokens), loss(build_auto(), tokens))
    model.save_pretrained(str(tmp_path))
    again = peft.PeftModel.from_pretrained(build_auto(), tmp_path)
    assert_near(again.eval()(tokens).logits, model.eval()(tokens).logits, 1e-5)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (peft.LNTuningConfig(target_modules=["norm"]), "would have no effect"),
        (peft.PrefixTuningConfig(num_virtual_tokens=3, task_type="CAUSAL_LM"), "past_key_values"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_method_of_peft_that_does_not_fit_is_refused(
    config: peft.PeftConfig, message: str
) -> None:
    with pytest.raises(UserError, match=message):
        peft.get_peft_model(build_auto(), config)(input_ids=random_tokens(2, 7))
