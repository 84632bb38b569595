"""Hybrids train with carried states; their results are checkpoints of their own architecture."""

import signal
from functools import partial
from pathlib import Path
from typing import Any, cast
from unittest.mock import Mock

import peft
import pytest
import torch
from transformers import AutoModelForCausalLM

from longrnn import load
from longrnn import train as train_run
from longrnn.data import TASKS
from longrnn.errors import UserError
from longrnn.hf.foreign_load import open_hugging_face
from longrnn.hf.hybrid.model import HybridLM
from longrnn.hf.hybrid.trainable import trainable
from longrnn.state import detach
from longrnn.text import ByteTokenizer
from longrnn.training.batches import segments
from longrnn.training.config import TrainConfig
from longrnn.training.distributed import build_accelerator
from longrnn.training.initial_states import INITIAL_STATES
from longrnn.training.models import build
from longrnn.training.objective import rows_of
from longrnn.training.train import dry_run
from longrnn.training.trainer import Trainer
from tests.contracts.builders import assert_near
from tests.hf.foreign import architecture, tokens, with_bytes
from tests.hf.hybrid.test_gradients import NARROW
from tests.launched import CPU2, FSDP2
from tests.texts import BOOK, TEXTS
from tests.training import forks
from tests.training.runs import assert_same_run, crash, metrics, tiny, train, write_config
from tests.training.test_processes import assert_two_train_like_one

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


@pytest.mark.parametrize("kind", ["falcon_h1", "qwen3_next"])
def test_a_run_ends_in_a_checkpoint_of_transformers(kind: str, tmp_path: Path) -> None:
    """`load` applies the window of attention that was trained."""
    base, output = hybrid(tmp_path, kind), tmp_path / "run"
    one = {"segments_per_step": 1, "gradient_accumulation_steps": 1}
    settings = config(base, output, task={"kind": "text", "data": str(BOOK)}, **one)
    train(settings)
    (batch,) = segments(TASKS.build(settings.task, ByteTokenizer()), settings, 0, 0)
    original = AutoModelForCausalLM.from_pretrained(base)
    tuned = AutoModelForCausalLM.from_pretrained(output, dtype="auto")
    with torch.no_grad():
        logits = original(input_ids=batch.tokens).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch.targets.flatten())
        text = tokens(2, 20)
        theirs = tuned(input_ids=text).logits
    assert metrics(output)[0]["loss"] == pytest.approx(float(loss), rel=1e-5)
    ours = load(output)
    assert isinstance(ours, HybridLM)
    assert (ours.attention_window, load(f"{output}+none").max_length) == ((LENGTH, 0), 128)
    assert_near(ours(text).logits, theirs, 1e-5)
    assert ours.fingerprint() != load(base).fingerprint()


def test_states_of_another_window_are_not_used(tmp_path: Path) -> None:
    train(config(hybrid(tmp_path), tmp_path / "run", max_steps=2))
    for step, window in ((3, 2 * LENGTH), (4, 8)):
        how = (f"max_steps={step}", f"attention_window={window}")
        assert train_run(None, *how, resume=tmp_path / "run").rows[-1]["step"] == step


def own_loop(model: HybridLM, settings: TrainConfig, rate: float) -> list[float]:
    """Truncated backpropagation through time with a window of attention, without the trainer."""
    model, task = model.with_attention_window(LENGTH), TASKS.build(settings.task, ByteTokenizer())
    optimizer = torch.optim.AdamW(model.parameters(), rate, (0.9, 0.95), weight_decay=0)
    states, losses = {}, []
    for step in range(settings.max_steps):
        total = torch.zeros((), dtype=torch.float64)
        for micro in range(settings.gradient_accumulation_steps):
            parts, state = segments(task, settings, step, micro), states.get(micro)
            for part in parts:
                logits, state = model(part.tokens, state)
                loss = torch.nn.functional.cross_entropy(logits.mT, part.targets)
                total += loss / len(parts) / settings.gradient_accumulation_steps
            states[micro] = detach(state)
        total.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), settings.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(total.detach()))
    return losses


@pytest.mark.parametrize("kind", ["falcon_h1", "granitemoehybrid", "qwen3_next", "kimi_linear"])
def test_a_run_is_that_of_an_own_loop(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With carried states, segments and micro-batches: losses and final weights, in float64."""
    theirs = architecture(kind, vocab_size=256).double()
    initial = {name: weight.clone() for name, weight in theirs.state_dict().items()}
    loaded: Any = open_hugging_face(theirs)
    monkeypatch.setattr("longrnn.training.models.load", lambda name: loaded)
    theirs.float = lambda: theirs  # a run casts the weights of any other checkpoint
    one_book = {"kind": "text", "data": str(BOOK)}
    rate = {"learning_rate": 1e-2, "lr_scheduler_type": "constant", "warmup_steps": 0}
    carry = {"initial_state": {"kind": "carry"}, "tokenizer": "bytes"}
    settings = config(tmp_path, tmp_path / "run", task=one_book, **rate, **carry)
    trainer = Trainer(settings, build_accelerator(settings), quiet=True)
    found = [trainer.train_step()["loss"] for trainer.step in range(settings.max_steps)]
    trained = {name: weight.clone() for name, weight in theirs.state_dict().items()}
    theirs.load_state_dict(initial)
    tolerance = 1e-5 if kind in NARROW else 1e-9
    losses = own_loop(loaded.train(), settings, 1e-2)
    assert losses == pytest.approx(found, rel=1e-5)  # metrics are float32
    for name, weight in theirs.state_dict().items():
        assert_near(trained[name], weight, tolerance, name)


LEARNED = {"initial_state": {"kind": "learned"}}
ADAPTERS = {"r": 2, "targets": ["in_proj", "q_proj"], "full": ["A_log", "dt_bias", "conv1d"]}


@pytest.mark.parametrize(
    ("number", "changes"),
    [
        (signal.SIGTERM, {"mitigation": "state_norm(threshold=1)"}),
        (signal.SIGKILL, {"peft": ADAPTERS, "segments_per_step": 1, **LEARNED}),
    ],
)
def test_resume_is_exact(number: signal.Signals, changes: dict[str, Any], tmp_path: Path) -> None:
    """Killed or stopped, and resumed, a run ends bit for bit where an undisturbed one does."""
    base, long = hybrid(tmp_path), {"max_steps": 9, "save_steps": 2}
    whole, part = (config(base, tmp_path / name, **long, **changes) for name in ("whole", "part"))
    train(whole)
    path = write_config(part, tmp_path / "config.yaml")
    process = forks.Fork("train", path, folder=tmp_path / "log")
    assert process.when(lambda: forks.rows(tmp_path / "part") >= 4)
    process.send(number)
    assert process.end() == (0 if number == signal.SIGTERM else -number), process.err
    assert not list((tmp_path / "part").glob("*.safetensors"))
    train(part, resume=True)
    assert_same_run(tmp_path / "whole", tmp_path / "part")
    model = load(tmp_path / "part")
    assert (model.mitigation is None) == ("mitigation" not in changes)


def test_dropout_is_a_function_of_the_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Validation is done without, and a resumed run has the same bits, however often it is done."""
    base = with_bytes(architecture("bamba", vocab_size=256, attention_dropout=0.5), tmp_path / "b")
    options: dict[str, Any] = {"task": {"kind": "text", "data": str(BOOK)}, "max_steps": 3}
    options |= {"validation": "held_out", "eval_samples": 2, "eval_length": LENGTH}
    every, whole, part = (
        config(base, tmp_path / name, **options, eval_steps=steps)
        for name, steps in (("every", 1), ("whole", 3), ("part", 3))
    )
    train(every)
    train(whole)
    crash(part, 2, monkeypatch)
    train(part, resume=True)
    assert_same_run(tmp_path / "whole", tmp_path / "part")
    names = ("every", "whole")
    one, other = ((tmp_path / name / "model.safetensors").read_bytes() for name in names)
    assert one == other
    rows = TASKS.build(cast("dict[str, Any]", whole.validation), None).held_out(2, length=LENGTH)
    logits = load(tmp_path / "whole")(rows.tokens, rows=rows_of(rows, slice(None))).logits
    loss = torch.nn.functional.cross_entropy(logits.mT, rows.targets)
    assert metrics(tmp_path / "whole")[-2]["eval_loss"] == pytest.approx(loss.item(), rel=1e-5)


def test_recomputation_and_a_dry_run(tmp_path: Path) -> None:
    base = hybrid(tmp_path)
    assert "tokens/s" in dry_run(config(base, tmp_path / "no"), quiet=True)
    assert not (tmp_path / "no").exists()
    for recomputed in ("no", "block", "segment"):
        train(config(base, tmp_path / recomputed, gradient_checkpointing=recomputed))
        assert_same_run(tmp_path / "no", tmp_path / recomputed)


@pytest.mark.parametrize(
    ("kind", "targets"),
    [
        ("falcon_h1", ["in_proj", "q_proj"]),
        ("bamba", ["in_proj", "out_proj"]),
        ("mamba2", ["backbone.layers.0.mixer.in_proj"]),
    ],
)
def test_adapters_have_the_names_of_the_architecture(
    kind: str, targets: list[str], tmp_path: Path
) -> None:
    """PEFT opens them on the Hugging Face model, and `load` merges them."""
    base, output = hybrid(tmp_path, kind), tmp_path / "run"
    train(config(base, output, peft=ADAPTERS | {"targets": targets}, learning_rate=0.05))
    theirs: Any = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), output)
    merged, text = load(output), tokens(2, 20)
    assert all(weight.requires_grad for weight in merged.parameters())
    with torch.no_grad():
        wanted = theirs.eval()(text, use_cache=False).logits
        untrained = load(base)(text).logits
        assert_near(merged(text).logits, wanted, 1e-5)
    assert (wanted - untrained).abs().max() > 0.1
    assert getattr(merged, "attention_window", None) in (None, (LENGTH, 0))


def test_weights_that_no_layer_uses_keep_their_values(tmp_path: Path) -> None:
    """A Zamba2 whose blocks are not tied has adapters that belong to other blocks."""
    base = architecture("zamba2", vocab_size=256, tie_word_embeddings=False)
    output = tmp_path / "run"
    train(config(with_bytes(base, tmp_path / "base"), output, max_steps=2))
    original, tuned = load(tmp_path / "base").state_dict(), load(output).state_dict()
    kept = [name for name, weight in original.items() if torch.equal(weight, tuned[name])]
    assert len(kept) == 4
    assert all("adapter_list" in name for name in kept)


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
        assert model.attention_window == ((LENGTH, 0) if carried else None)


def quantized(theirs: Any) -> None:
    theirs.config.quantization_config = {"quant_method": "torchao"}


def not_differentiable(theirs: Any) -> None:
    norm = theirs.model.final_layernorm
    norm.register_forward_hook(lambda module, given, result: result.detach())


@pytest.mark.parametrize(
    ("kind", "changes", "damage", "message"),
    [
        ("xlstm", {"attention_window": 16}, None, "attention_window"),
        ("falcon_h1", {"attention_window": 999}, None, "128 tokens"),
        ("falcon_h1", {"peft": {"targets": ["conv1d"]}}, None, "peft.full"),
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


def test_a_lack_of_memory_is_not_taken_for_a_missing_gradient(tmp_path: Path) -> None:
    model: Any = load(hybrid(tmp_path, "falcon_h1"))
    failure = torch.OutOfMemoryError("CUDA out of memory")
    model.model.model.final_layernorm.register_forward_hook(Mock(side_effect=failure))
    with pytest.raises(torch.OutOfMemoryError):
        trainable(model)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "flags", "recomputed"),
    [
        ("falcon_h1", CPU2, "block"),
        ("falcon_h1", FSDP2, "segment"),
        ("zamba", FSDP2, "block"),
    ],
    ids=["copies", "shards", "shared layers"],
)
def test_two_processes_train_like_one(
    kind: str, flags: tuple[str, ...], recomputed: str, tmp_path: Path
) -> None:
    configured = partial(config, hybrid(tmp_path, kind), gradient_checkpointing=recomputed)
    assert_two_train_like_one(configured, tmp_path, flags)
