"""Hybrids train with carried states; their results are checkpoints of their own architecture."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from transformers import AutoModelForCausalLM

from longrnn import load
from longrnn.data import TASKS
from longrnn.errors import UserError
from longrnn.hf.hybrid.model import HybridLM
from longrnn.text import ByteTokenizer
from longrnn.training.batches import segments
from longrnn.training.config import TrainConfig
from longrnn.training.initial_states import INITIAL_STATES
from longrnn.training.models import build
from longrnn.training.train import dry_run
from tests.contracts.builders import assert_near
from tests.hf.architectures import architecture
from tests.hf.foreign import tokens, with_bytes
from tests.launched import CPU2
from tests.texts import BOOK, TEXTS
from tests.training.runs import assert_same_run, crash, metrics, tiny, train
from tests.training.test_processes import FSDP2, assert_alike, trained

LENGTH = 32
COMMON: dict[str, Any] = {
    "task": {"kind": "text", "data": TEXTS},
    "length": {"max": LENGTH},
    "max_steps": 4,
    "save_steps": 2,
    "logging_steps": 1,
}


def hybrid(folder: Path, kind: str = "falcon_h1") -> Path:
    return with_bytes(architecture(kind, vocab_size=256), folder / kind)


def config(base: Path, output: Path, **changes: Any) -> TrainConfig:
    """A run with a carried state, several segments per step and several micro-batches."""
    return tiny("streams", output, init_from=str(base), **COMMON | changes)


@pytest.mark.parametrize("kind", ["falcon_h1", "granitemoehybrid", "qwen3_next", "kimi_linear"])
def test_a_run_ends_in_a_checkpoint_of_transformers(kind: str, tmp_path: Path) -> None:
    """The first loss is that of transformers, whose classes open the result; `load` applies the
    window of attention that was trained."""
    base, output = hybrid(tmp_path, kind), tmp_path / "run"
    one = {"segments_per_step": 1, "gradient_accumulation_steps": 1}
    settings = config(base, output, task={"kind": "text", "data": str(BOOK)}, **one)
    train(settings)
    (batch,) = segments(TASKS.build(settings.task, ByteTokenizer()), settings, 0, 0)
    before = AutoModelForCausalLM.from_pretrained(base)
    after = AutoModelForCausalLM.from_pretrained(output, dtype="auto")
    with torch.no_grad():
        logits = before(input_ids=batch.tokens).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch.targets.flatten())
        text = tokens(2, 20)
        theirs = after(input_ids=text).logits
    assert metrics(output)[0]["loss"] == pytest.approx(float(loss), rel=1e-5)
    ours = load(output)
    assert isinstance(ours, HybridLM)
    assert (ours.attention_window, load(f"{output}+none").max_length) == (LENGTH, 128)
    assert_near(ours(text).logits, theirs, 1e-5)
    assert ours.fingerprint() != load(base).fingerprint()


@pytest.mark.parametrize("changes", [{}, {"mitigation": "state_norm(threshold=1)"}])
def test_resume_is_exact(
    changes: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Interrupted and resumed, a run ends bit for bit where an undisturbed one does."""
    base = hybrid(tmp_path)
    whole, part = (config(base, tmp_path / name, **changes) for name in ("whole", "part"))
    train(whole)
    crash(part, 3, monkeypatch)
    train(part, resume=True)
    assert_same_run(tmp_path / "whole", tmp_path / "part")
    model = load(tmp_path / "part")
    assert (model.mitigation is None) == (not changes)


def test_recomputation_and_a_dry_run(tmp_path: Path) -> None:
    """Recomputed layers give the same weights; a dry run writes nothing."""
    base, kept = hybrid(tmp_path), {}
    for how in ("no", "block"):
        settings = config(base, tmp_path / how, gradient_checkpointing=how)
        assert "tokens/s" in dry_run(settings, quiet=True)
        assert not (tmp_path / how).exists()
        train(settings)
        kept[how] = (tmp_path / how / "model.safetensors").read_bytes()
    assert kept["no"] == kept["block"]


@pytest.mark.parametrize(
    ("kind", "targets"),
    [
        ("falcon_h1", ["in_proj", "q_proj"]),
        ("mamba2", ["in_proj"]),
        ("mamba2", ["backbone.layers.0.mixer.in_proj"]),
    ],
)
def test_adapters_have_the_names_of_the_architecture(
    kind: str, targets: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PEFT opens them on the Hugging Face model, `load` merges them, and resume is exact."""
    base, outputs = hybrid(tmp_path, kind), [tmp_path / "whole", tmp_path / "part"]
    adapters = {"r": 2, "targets": targets, "full": ["A_log", "dt_bias", "conv1d"]}
    whole, part = (config(base, output, peft=adapters, learning_rate=0.05) for output in outputs)
    train(whole)
    crash(part, 3, monkeypatch)
    train(part, resume=True)
    for name in ("adapter_model.safetensors", "adapter_config.json"):
        assert (outputs[0] / name).read_bytes() == (outputs[1] / name).read_bytes()
    theirs: Any = peft.PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(base), outputs[0]
    )
    merged, text = load(outputs[0]), tokens(2, 20)
    with torch.no_grad():
        wanted = theirs.eval()(text, use_cache=False).logits
        before = load(base)(text).logits
        assert_near(merged(text).logits, wanted, 1e-5)
    assert (wanted - before).abs().max() > 0.1
    assert getattr(merged, "attention_window", LENGTH) == LENGTH


SLOW = [pytest.param(kind, marks=pytest.mark.slow) for kind in ("falcon_h1", "xlstm")]


@pytest.mark.parametrize("kind", ["recurrent_gemma", *SLOW])
def test_every_initial_state(kind: str, tmp_path: Path) -> None:
    """Also in bfloat16 products, and in models whose attention has a window, or none."""
    base = hybrid(tmp_path, kind)
    for name in INITIAL_STATES:
        output = tmp_path / name
        more = {"segments_per_step": 2 if name == "carry" else 1, "mixed_precision": "bf16"}
        more["max_steps"] = 2
        train(config(base, output, initial_state={"kind": name}, **more))
        model: Any = load(output)
        carried = name == "carry" and kind == "falcon_h1"
        assert model.attention_window == (LENGTH if carried else None)


def quantized(theirs: Any) -> None:
    theirs.config.quantization_config = {"quant_method": "torchao"}


def not_differentiable(theirs: Any) -> None:
    norm = theirs.model.final_layernorm
    norm.register_forward_hook(lambda module, given, result: result.detach())


@pytest.mark.parametrize(
    ("kind", "changes", "damage", "message"),
    [
        ("llama", {}, None, "without recurrent layers"),
        ("xlstm", {"attention_window": 16}, None, "attention_window"),
        ("falcon_h1", {"attention_window": 999}, None, "128 tokens"),
        ("falcon_h1", {}, quantized, "quantized"),
        ("falcon_h1", {}, not_differentiable, "gradients cannot be computed"),
    ],
)
def test_a_model_that_cannot_be_trained_is_refused(
    kind: str,
    changes: dict[str, Any],
    damage: Any,
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    base = hybrid(tmp_path, kind)
    if damage is not None:
        loaded: Any = load(base)
        damage(loaded.model)
        monkeypatch.setattr("longrnn.training.models.load", lambda name: loaded)
    settings = config(base, tmp_path / "run", **changes)
    with pytest.raises(UserError, match=message):
        build(settings, TASKS.build(settings.task, ByteTokenizer()))


@pytest.mark.slow
@pytest.mark.parametrize("flags", [CPU2, FSDP2], ids=["copies", "shards"])
def test_two_processes_train_like_one(flags: tuple[str, ...], tmp_path: Path) -> None:
    """With recomputation, and documents that begin in the middle of rows."""
    base = hybrid(tmp_path)
    one, two = (
        config(
            base,
            tmp_path / name,
            per_device_train_batch_size=rows,
            gradient_checkpointing="block",
        )
        for name, rows in (("one", 4), ("two", 2))
    )
    train(one)
    trained(two, tmp_path, flags)
    assert_alike(tmp_path / "one", tmp_path / "two")
