"""Options of a run: what they do, and what is refused."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file

from longrnn import RecurrentConfig, RecurrentLM, load, load_tokenizer
from longrnn import train as train_run
from longrnn.checkpoints.load import load_editable
from longrnn.errors import UserError
from longrnn.options import validated
from longrnn.training.config import TrainConfig, configured
from longrnn.training.optim import build_optimizer, fill, learning_rate, set_learning_rate
from tests.refusals import naming
from tests.texts import TEXTS, trained_bpe
from tests.training.runs import MAMBA2, tiny, train


def configuration(**options: Any) -> TrainConfig:
    return validated(TrainConfig, options, "test")


def rates(**options: Any) -> list[float]:
    config = configuration(**{"learning_rate": 1.0, "max_steps": 10} | options)
    return [round(learning_rate(step, config), 6) for step in range(10)]


def test_schedules() -> None:
    """A linear warm-up, then the shape; `decay_steps` leaves it constant until then."""
    warm = {"warmup_steps": 2}
    assert rates(lr_scheduler_type="constant", **warm) == [0.5] + [1.0] * 9
    linear = rates(lr_scheduler_type="linear", **warm)
    assert linear == [0.5, 1, *(round(1 - k / 8, 6) for k in range(8))]
    least = rates(lr_scheduler_type="linear", min_lr_rate=0.2, **warm)
    assert least[2:] == [round(0.2 + 0.8 * (1 - k / 8), 6) for k in range(8)]
    cosine = rates(lr_scheduler_type="cosine", **warm)
    assert cosine[2:] == [round(0.5 * (1 + math.cos(math.pi * k / 8)), 6) for k in range(8)]
    stable = rates(lr_scheduler_type="linear", decay_steps=4, **warm)
    assert stable == [0.5, 1, 1, 1, 1, 1, 1, 0.75, 0.5, 0.25]
    assert configuration(max_steps=5000).warmup_steps == 100
    assert configuration(max_steps=50, decay_steps=48).warmup_steps == 2


def test_overrides_drop_what_has_no_meaning_with_them() -> None:
    """A short run has the default warm-up, and independent rows have one segment per step."""
    assert configured("books_256", ["max_steps=3"]).warmup_steps == 0
    assert configured("books_256", ["max_steps=500"]).warmup_steps == 100
    assert configured("passkey_tiny", ["initial_state.kind=zero"]).segments_per_step == 1
    assert configured("passkey_tiny", ["initial_state.kind=carry"]).segments_per_step == 3
    with pytest.raises(UserError, match=naming("warmup_steps=9")):
        configured("books_256", ["max_steps=3", "warmup_steps=9"])


def test_parameters_by_pattern() -> None:
    model = RecurrentLM(RecurrentConfig(**MAMBA2))
    scale = {"*.A_log": 5, "blocks.0.*": 2, "blocks.0.*.A_log": 0}
    values = {"learning_rate_scale": scale, "weight_decay": 0.3, "learning_rate": 0.5}
    values |= {"adam_beta2": 0.7, "adam_epsilon": 1e-5}
    config = TrainConfig(**values)
    optimizer = build_optimizer(model, config)
    set_learning_rate(optimizer, 500, config)
    found = {id(p): group for group in optimizer.param_groups for p in group["params"]}
    named = dict(model.named_parameters())
    rate = learning_rate(500, config)
    assert {(g["betas"], g["eps"]) for g in optimizer.param_groups} == {((0.9, 0.7), 1e-5)}
    assert found[id(named["blocks.1.mixer.A_log"])]["lr"] == pytest.approx(5 * rate)
    assert found[id(named["blocks.0.mixer.dt_bias"])]["lr"] == pytest.approx(2 * rate)
    assert id(named["blocks.0.mixer.A_log"]) not in found
    assert not named["blocks.0.mixer.A_log"].requires_grad
    decayed = {n for n, p in named.items() if found.get(id(p), {}).get("weight_decay")}
    ends = {name.rpartition("mixer.")[2] for name in decayed}
    assert ends == {"embedding.weight", "in_proj.weight", "out_proj.weight", "conv1d.weight"}
    fill(model, {"*.A_log": 3.0, "blocks.1.mixer.A_log": 4.0})
    assert named["blocks.0.mixer.A_log"].unique().tolist() == [3.0]
    assert named["blocks.1.mixer.A_log"].unique().tolist() == [4.0]


def test_mixed_precision_and_a_mitigation(tmp_path: Path) -> None:
    spec = "state_norm(threshold=0.5)"
    how = {"max_steps": 4, "mitigation": spec, "mixed_precision": "bf16"}
    model: Any = train(tiny("passkey", tmp_path / "other", **how)).model()
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert str(model.mitigation) == spec
    other, weak = str(tmp_path / "other"), "state_norm(threshold=0.25)"
    cases = (
        (spec, other, {}),
        (None, other, {"mitigation": "none"}),
        (weak, f"{other}+{weak}", {}),
    )
    for name, start, given in cases:
        how = {"init_from": start, "max_steps": 1, **given}
        model = train(tiny("passkey", tmp_path / str(name), **how)).model()
        assert (model.mitigation and str(model.mitigation)) == name


def test_a_calibrated_mitigation_is_trained_resumed_and_saved(tmp_path: Path) -> None:
    base: Any = load("recall-collapse")
    file = Path(base.loaded_from) / "per_head.yaml"
    how = {"init_from": "recall-collapse", "mitigation": str(file), "length": {"max": 180}}
    train(tiny("passkey", tmp_path / "run", max_steps=1, **how))
    model: Any = train_run(None, "max_steps=2", resume=tmp_path / "run").model()
    assert str(model.mitigation) == str(base.under(file).mitigation)
    assert "None" in model.trained_under


PEFT = {"r": 2, "full": ["A_log", "dt_bias", "conv1d"]}


def test_adapters(tmp_path: Path) -> None:
    base = tmp_path / "base"
    train(tiny("streams", base, max_steps=1))
    run = tiny("streams", tmp_path / "run", init_from=str(base), peft=PEFT)
    train(run)
    tokens = torch.arange(90)[None]
    with torch.no_grad():
        ours: Any = load(tmp_path / "run")
        wanted = ours(tokens).logits
        plain: Any = load(base)
        assert not torch.allclose(wanted, plain(tokens).logits, atol=1e-4)
        theirs: Any = PeftModel.from_pretrained(load_editable(base), tmp_path / "run")  # type: ignore[arg-type]
        torch.testing.assert_close(theirs(tokens).logits, wanted, rtol=0, atol=1e-5)
    names = load_file(tmp_path / "run/adapter_model.safetensors")
    assert {name.split(".mixer.")[1].split(".")[0] for name in names} == {
        *("in_proj", "out_proj", "A_log", "dt_bias", "conv1d")
    }
    assert not (tmp_path / "run/checkpoint-00000010/model.safetensors").exists()
    train(tiny("streams", tmp_path / "other", max_steps=1, seed=1))
    with pytest.raises(UserError, match=naming("other")):
        train_run(None, f"init_from={tmp_path / 'other'}", "max_steps=11", resume=tmp_path / "run")


def test_text_needs_no_corpus_beforehand(tmp_path: Path) -> None:
    """Data is tokenized with the tokenizer of the checkpoint, which is saved with the model."""
    trained_bpe().save(tmp_path / "bpe")
    task = {"kind": "text", "data": TEXTS[:4]}
    model = {key: value for key, value in MAMBA2.items() if key != "vocab_size"}
    how = {"task": task, "max_steps": 3, "model": model, "tokenizer": str(tmp_path / "bpe")}
    done = train(tiny("streams", tmp_path / "one", **how))
    assert done.model().vocab_size == trained_bpe().vocab_size
    assert load_tokenizer(tmp_path / "one").fingerprint() == trained_bpe().fingerprint()
    second = {"task": task, "max_steps": 2, "init_from": str(tmp_path / "one")}
    train(tiny("streams", tmp_path / "two", **second))
    assert load_tokenizer(tmp_path / "two").fingerprint() == trained_bpe().fingerprint()
    places = (tmp_path / name / "tokenizer_config.json" for name in ("bpe", "one", "two"))
    assert len({path.read_text() for path in places}) == 1
    with pytest.raises(UserError, match=naming("tokenizer", "ids")):
        train(tiny("streams", tmp_path / "three", **second, tokenizer="bytes"))
