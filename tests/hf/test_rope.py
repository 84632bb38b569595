"""`rope(type=…)`: the scalings of rotary encodings that transformers has."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from longrnn import load
from longrnn.errors import UserError
from tests.contracts.builders import assert_near
from tests.hf.foreign import assert_continues, causal, in_one_call, tokens
from tests.refusals import naming

LONG = [float(1 + k) for k in range(4)]
THETA = {"rope_theta": 10_000.0}
ORIGINAL = {"original_max_position_embeddings": 128}
# Options of the name, and the parameters that a configuration has instead.
SCALINGS = {
    "type=linear, factor=4": {"rope_type": "linear", "factor": 4.0},
    "type=yarn, factor=4": {"rope_type": "yarn", "factor": 4.0, **ORIGINAL},
    "type=yarn, factor=2, beta_fast=16": {
        "rope_type": "yarn", "factor": 2.0, "beta_fast": 16.0, **ORIGINAL,
    },
    "type=llama3, factor=4, low_freq_factor=1, high_freq_factor=4": {
        "rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        **ORIGINAL,
    },
    "type=longrope, factor=4, long_factor=[1, 2, 3, 4]": {
        "rope_type": "longrope", "factor": 4.0, "long_factor": LONG, "short_factor": [1.0] * 4,
        **ORIGINAL,
    },
}  # fmt: skip


@pytest.mark.parametrize("options", SCALINGS)
@pytest.mark.parametrize("kind", ["llama", "gemma3_text"])
def test_it_equals_a_model_with_that_configuration(options: str, kind: str, tmp_path: Path) -> None:
    parameters: Any = SCALINGS[options] | THETA
    factor = int(parameters["factor"])
    plain = causal(kind)
    plain.save_pretrained(tmp_path)
    if kind == "gemma3_text":
        both = plain.config.rope_parameters
        parameters = both | {"full_attention": both["full_attention"] | SCALINGS[options]}
    theirs = causal(kind, rope_parameters=parameters, max_position_embeddings=128 * factor)
    theirs.load_state_dict(plain.state_dict())
    model: Any = load(f"{tmp_path}+rope({options})")
    assert model.max_length == 128 * factor
    text = tokens(2, 150) % 60
    wanted = in_one_call(theirs, text)
    assert not torch.allclose(wanted, load(f"{tmp_path}+beyond")(text).logits, atol=1e-4)
    assert_continues(model, text, wanted, 1e-5)
    wide = load(f"{tmp_path}+rope({options})+attention_window(window=160)")
    assert_near(wide(text).logits, wanted, 1e-5)
    assert model.fingerprint() != load(tmp_path).fingerprint()


def test_longrope_takes_the_numbers_of_a_configuration(tmp_path: Path) -> None:
    """Its long ones, at every length; the model without the name is refused."""
    parameters = {**THETA, **ORIGINAL, "rope_type": "longrope", "factor": 4.0, "long_factor": LONG}
    parameters["short_factor"] = [1.0] * 4
    theirs = causal("llama", rope_parameters=parameters, max_position_embeddings=512)
    theirs.save_pretrained(tmp_path)
    with pytest.raises(UserError, match=naming("longrope")):
        load(tmp_path)
    model: Any = load(f"{tmp_path}+rope(type=longrope)")
    text = tokens(1, 150)
    assert_near(model(text).logits, in_one_call(theirs, text), 1e-5)
    assert model.max_length == 512


def test_it_is_refused_where_nothing_is_rotated_or_it_is_given_twice(tmp_path: Path) -> None:
    causal("granitemoehybrid", position_embedding_type="nope").save_pretrained(tmp_path / "granite")
    causal("falcon", alibi=True).save_pretrained(tmp_path / "falcon")
    for name in ("granite", "falcon"):
        with pytest.raises(UserError, match=naming("rope", "rotate")):
            load(f"{tmp_path / name}+rope(type=linear, factor=4)")
    causal("llama").save_pretrained(tmp_path / "llama")
    with pytest.raises(UserError, match="second"):
        load(f"{tmp_path / 'llama'}+rope(type=linear, factor=4)+rope(type=linear, factor=2)")


def test_the_base_of_an_adapter_is_scaled(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    causal("llama").save_pretrained(tmp_path / "base")
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    config = peft.LoraConfig(target_modules=["q_proj"], init_lora_weights=False)
    peft.get_peft_model(base, config).save_pretrained(tmp_path / "adapter")
    merged: Any = load(tmp_path / "adapter")
    merged.model.save_pretrained(tmp_path / "merged")
    text, scaled = tokens(1, 150), "rope(type=linear, factor=4)"
    found, wanted = (load(f"{tmp_path / name}+{scaled}") for name in ("adapter", "merged"))
    assert_near(found(text).logits, wanted(text).logits, 1e-5)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("type=dynamic, factor=2", "length"),
        ("factor=2", "linear"),
        ("type=yarn", "factor"),
        ("type=yarn, factor=2, speed=3", "factor"),
        ("type=linear, factor=-1", "above 0"),
        ("type=longrope, factor=2", "long_factor"),
    ],
)
def test_other_scalings_are_refused(options: str, words: str, tmp_path: Path) -> None:
    causal("llama").save_pretrained(tmp_path)
    with pytest.raises(UserError, match=naming("rope(", words)):
        load(f"{tmp_path}+rope({options})")


def test_a_model_without_rotary_positions_is_refused(tmp_path: Path) -> None:
    causal("gpt2").save_pretrained(tmp_path)
    with pytest.raises(UserError, match=naming("gpt2")):
        load(f"{tmp_path}+rope(type=yarn, factor=2)")
    with pytest.raises(UserError, match="rope"):
        load("passkey-tiny+rope(type=yarn, factor=2)")
