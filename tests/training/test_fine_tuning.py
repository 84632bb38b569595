"""Fine-tuning: weights in float32 whatever the file holds, and the tokenizer of the checkpoint."""

from __future__ import annotations

import json
import shutil
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from longrnn import load, load_tokenizer
from longrnn.config import build_config
from longrnn.errors import UserError
from longrnn.files import write_atomic
from longrnn.hf.layouts import LAYOUTS
from longrnn.hf.tokenizer import byte_level
from longrnn.models import RecurrentConfig, RecurrentLM
from longrnn.models.checkpoint import save_model
from longrnn.text import ByteTokenizer
from longrnn.training.config import TrainConfig
from longrnn.training.initial_states import INITIAL_STATES
from longrnn.training.trainer import Trainer
from tests.hf.foreign import causal, with_bytes
from tests.refusals import naming
from tests.tasks.test_passkey import trained_bpe
from tests.texts import TEXTS
from tests.training.runs import MAMBA2, last_checkpoint, metrics, tiny, train

NARROW = [torch.float16, torch.bfloat16]
narrow = pytest.mark.parametrize("dtype", NARROW, ids=["float16", "bfloat16"])
layouts = pytest.mark.parametrize("layout", list(LAYOUTS))


def published(folder: Path, layout: str, dtype: torch.dtype, *, mixed: bool = True) -> str:
    """A small Mamba-2 in one of the published layouts, with a tokenizer of bytes.

    Its weights are those of `dtype` whatever the dtype they are written in, so that checkpoints
    of two dtypes can hold the same model.

    Args:
        folder: is made.
        layout: of `LAYOUTS`.
        dtype: of the matrices.
        mixed: whether A_log, dt_bias and D are float32, as in the published checkpoints.
    """
    torch.manual_seed(0)
    model = RecurrentLM(build_config(RecurrentConfig, {**MAMBA2, "residual_in_fp32": True}))
    for name, parameter in model.named_parameters():
        wide = mixed and name.rpartition(".")[2] in ("A_log", "dt_bias", "D")
        parameter.data = parameter.data if wide else parameter.data.to(dtype)
    LAYOUTS[layout].save(model, folder)
    write_atomic(folder / "config.json", LAYOUTS[layout].write(model))
    byte_level().save(folder)
    return str(folder)


def widened(source: str, folder: Path) -> str:
    """The same checkpoint with the same weights in float32."""
    shutil.copytree(source, folder)
    pickled, safe = folder / "pytorch_model.bin", folder / "model.safetensors"
    if safe.is_file():
        save_file({n: t.float() for n, t in load_file(safe).items()}, safe, {"format": "pt"})
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, "dtype": "float32"}))
    else:
        weights = torch.load(pickled, weights_only=True)
        torch.save({name: tensor.float() for name, tensor in weights.items()}, pickled)
    return str(folder)


def tuned(run: Path, source: str, **changes: Any) -> TrainConfig:
    usual = {"task": {"kind": "text", "files": TEXTS, "max_segments": 4}, "length": {"max": 16}}
    config = tiny("streams", run, init_from=source, max_steps=2, logging_steps=1, **usual)
    config.segments_per_step = config.gradient_accumulation_steps = 1
    config.initial_state = {"kind": "zero"}
    for name, value in changes.items():
        setattr(config, name, value)
    return config


# Half of all combinations of layout, dtype, precision and start, with all of any three of them.
FACTORS = (LAYOUTS, NARROW, ("no", "bf16"), INITIAL_STATES)
HALF = [
    case for case in product(*map(enumerate, FACTORS)) if sum(number for number, _ in case) % 2 == 0
]


@pytest.mark.parametrize(
    ("layout", "dtype", "precision", "start"), [[value for _, value in case] for case in HALF]
)
def test_a_narrow_checkpoint_is_trained_in_float32(
    layout: str, dtype: torch.dtype, precision: str, start: str, tmp_path: Path
) -> None:
    """A run from float16 or bfloat16 equals, bit for bit, one from the same weights in float32.

    Some checkpoints have A_log, dt_bias and D in float32, as published, and some have not.
    """
    mixed = (layout == "native") != (start == "carry")
    source = published(tmp_path / "narrow", layout, dtype, mixed=mixed)
    how = {"mixed_precision": precision, "initial_state": {"kind": start}}
    trainer = train(tuned(tmp_path / "a", source, **how))
    model = trainer.model
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    moments = [s["exp_avg_sq"] for s in trainer.optimizer.state_dict()["state"].values()]
    assert all(moment.dtype == torch.float32 for moment in moments)
    train(tuned(tmp_path / "b", widened(source, tmp_path / "wide"), **how))
    assert metrics(tmp_path / "a") == metrics(tmp_path / "b")
    runs = [(tmp_path / name / "model.safetensors").read_bytes() for name in "ab"]
    assert runs[0] == runs[1]
    # No weight is as it was: in a narrow dtype, small steps are lost.
    before = load(source).state_dict()
    for name, weight in model.state_dict().items():
        assert not torch.equal(weight, before[name].float()), name


@layouts
@narrow
def test_one_line_of_the_log_says_so(
    layout: str, dtype: torch.dtype, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The log names a narrow checkpoint and its dtype, and is silent for float32."""
    source = published(tmp_path / "narrow", layout, dtype)
    name = str(dtype).removeprefix("torch.")
    Trainer(tuned(tmp_path / "a", source))
    (line,) = [line for line in capsys.readouterr().err.splitlines() if str(source) in line]
    assert name in line
    Trainer(tuned(tmp_path / "b", widened(source, tmp_path / "wide")))
    assert name not in capsys.readouterr().err


@narrow
def test_a_narrow_transformer_is_trained_and_saved_in_float32(
    dtype: torch.dtype, tmp_path: Path
) -> None:
    """The saved configuration says float32 too: a reader would narrow the weights again."""
    source = with_bytes(causal("llama", dtype, vocab_size=256), tmp_path / "llama")
    trainer = train(tuned(tmp_path / "run", str(source)))
    weights = trainer.model.state_dict()
    assert {weight.dtype for weight in weights.values()} == {torch.float32}
    again: Any = load(tmp_path / "run")
    for name, weight in again.model.state_dict().items():
        assert weight.dtype == torch.float32
        assert torch.equal(weight, weights[f"model.{name}"])


@layouts
@narrow
@pytest.mark.parametrize("asked", [None, *NARROW, torch.float32], ids=str)
def test_inference_never_rounds_the_rates(
    layout: str, dtype: torch.dtype, asked: torch.dtype | None, tmp_path: Path
) -> None:
    """A_log, dt_bias and D stay as stored beside narrow matrices, and every split agrees."""
    source = published(tmp_path / "mixed", layout, dtype)
    model, whole = load(source, dtype=asked), load(source, dtype=torch.float32)
    assert isinstance(model, RecurrentLM)
    for name, parameter in model.named_parameters():
        rate = name.rpartition(".")[2] in ("A_log", "dt_bias", "D")
        assert parameter.dtype == (torch.float32 if rate else asked or dtype), name
        if rate:
            assert torch.equal(parameter, whole.state_dict()[name])
    tokens = torch.arange(40)[None]
    with torch.no_grad():
        logits, _ = model(tokens)
        first = model(tokens[:, :13])
        second, _ = model(tokens[:, 13:], first.state)
        expected, _ = whole(tokens)
    parts = torch.cat([first.logits, second], dim=1)
    torch.testing.assert_close(parts.float(), logits.float(), atol=0.05, rtol=0.05)
    torch.testing.assert_close(logits.float(), expected.float(), atol=0.3, rtol=0.1)


def checkpoint_with_bpe(folder: Path) -> Any:
    bpe: Any = trained_bpe()
    torch.manual_seed(0)
    sizes = {**MAMBA2, "vocab_size": bpe.vocab_size}
    model = RecurrentLM(build_config(RecurrentConfig, sizes))
    bpe.save(folder)
    save_model(model, folder, tokenizer="tokenizer.json")
    return bpe


def test_the_tokenizer_of_the_checkpoint_is_the_default(tmp_path: Path) -> None:
    """The ids of training are those that the model was trained with, and are saved with it."""
    bpe = checkpoint_with_bpe(tmp_path / "first")
    trainer = train(tuned(tmp_path / "run", str(tmp_path / "first")))
    assert trainer.tokenizer.fingerprint() == bpe.fingerprint()
    for folder in (tmp_path / "run", last_checkpoint(tmp_path / "run")):
        assert load_tokenizer(folder).fingerprint() == bpe.fingerprint()
    recorded = (tmp_path / "run/train.yaml").read_text()
    assert f"tokenizer: {tmp_path / 'first'}" in recorded
    bytewise = train(tuned(tmp_path / "next", str(train_bytes(tmp_path / "bytes"))))
    assert isinstance(bytewise.tokenizer, ByteTokenizer)
    assert "tokenizer: bytes" in (tmp_path / "next/train.yaml").read_text()


def train_bytes(folder: Path) -> Path:
    config = tiny("passkey", folder, max_steps=1)
    train(config)
    return folder


@pytest.mark.parametrize("tokenizer", [None, "bytes"])
def test_a_mitigation_in_init_from_is_refused(tokenizer: str | None, tmp_path: Path) -> None:
    config = tuned(tmp_path / "run", "passkey-tiny+forget_more", tokenizer=tokenizer, model=None)
    with pytest.raises(UserError, match="mitigation"):
        Trainer(config, quiet=True)


def test_a_tokenizer_of_another_vocabulary_is_refused(tmp_path: Path) -> None:
    """A model of many ids is not trained on bytes, nor one of few on more ids than it has."""
    checkpoint_with_bpe(tmp_path / "first")
    small = train_bytes(tmp_path / "bytes")
    with pytest.raises(UserError, match="init_from"):
        Trainer(tuned(tmp_path / "run", str(small), tokenizer=str(tmp_path / "first")), quiet=True)
    torch.manual_seed(0)
    large = RecurrentLM(build_config(RecurrentConfig, {**MAMBA2, "vocab_size": 2000}))
    save_model(large, tmp_path / "large")
    changes: dict[str, Any] = {"tokenizer": "bytes"}
    with pytest.raises(UserError, match=naming(256, "init_from", "2,000")):
        Trainer(tuned(tmp_path / "run", str(tmp_path / "large"), **changes), quiet=True)
    assert not (tmp_path / "run").exists()


@layouts
def test_a_checkpoint_without_a_tokenizer_asks_for_one(layout: str, tmp_path: Path) -> None:
    """Bytes are not assumed, and are used if given by name."""
    source = published(tmp_path / "bare", layout, torch.float32)
    for file in Path(source).glob("tokenizer*"):
        file.unlink()
    with pytest.raises(UserError, match="tokenizer"):
        Trainer(tuned(tmp_path / "run", source), quiet=True)
    assert not (tmp_path / "run").exists()
    train(tuned(tmp_path / "run", source, tokenizer="bytes"))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": {"d_model": 999}}, "model.d_model"),
        ({"model": {"position": {"kind": "sinusoidal"}}}, "model.position.kind"),
        ({"model": {**MAMBA2, "n_layers": 3}}, "model.n_layers"),
        ({"model": {}}, "model.d_model"),
        ({"transformer": {"model_type": "llama"}}, ""),
    ],
)
def test_another_model_beside_init_from_is_refused(
    changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    """A `model` that differs from the checkpoint is refused; an equal one is accepted."""
    source = str(train_bytes(tmp_path / "first"))
    base = {"init_from": source, "output_dir": str(tmp_path / "run"), "warmup_steps": 1}
    with pytest.raises(UserError) as refusal:
        Trainer(build_config(TrainConfig, {**base, **changes}), quiet=True)
    assert message in str(refusal.value)
    assert not (tmp_path / "run").exists()
    same = build_config(TrainConfig, {**base, "model": MAMBA2, "max_steps": 1})
    same.length.max = 180
    train(same)


def test_a_model_beside_a_transformer_is_refused(tmp_path: Path) -> None:
    """`model` and `transformer` together are refused."""
    with pytest.raises(UserError, match=naming("transformer", "model")):
        tiny("passkey", tmp_path, transformer={"model_type": "llama"}, model=MAMBA2)


def test_weights_that_are_not_finite_are_refused(tmp_path: Path) -> None:
    """A run never starts from weights that are not finite."""
    source = train_bytes(tmp_path / "first")
    weights = load_file(source / "model.safetensors")
    weights["blocks.1.mixer.D"][0] = float("nan")
    save_file(weights, source / "model.safetensors")
    (source / "checksums.json").unlink()
    with pytest.raises(UserError, match="blocks.1.mixer.D"):
        Trainer(tuned(tmp_path / "run", str(source)), quiet=True)
    assert not (tmp_path / "run").exists()
