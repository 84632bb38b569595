"""A run that trains the initial state of a checkpoint, whose weights stay."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from longrnn import load
from longrnn import train as train_run
from longrnn.checkpoints.opened import open_checkpoint
from longrnn.errors import UserError
from longrnn.models import generate
from longrnn.training.config import TrainConfig
from tests.launched import CPU2, FSDP2, launched
from tests.texts import BOOK, TEXTS
from tests.training.runs import (
    assert_same_run,
    crash,
    last_checkpoint,
    metrics,
    saved,
    tiny,
    train,
    write_config,
)
from tests.training.test_processes import assert_two_train_like_one

LEARNED: dict[str, Any] = {
    "initial_state": {"kind": "learned"},
    "task": {"kind": "text", "data": TEXTS},
    "length": {"max": 64},
    "learning_rate": 0.1,
    "lr_scheduler_type": "constant",
    "logging_steps": 1,
    "warmup_steps": 0,
}
STATE = "initial_state.safetensors"


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved(tmp_path_factory.mktemp("learned") / "base")


# What rows that do not continue have.
FIXED: dict[str, Any] = {"segments_per_step": 1, "gradient_accumulation_steps": 1}


def config(base: Path, output: Path, **changes: Any) -> TrainConfig:
    return tiny("streams", output, init_from=str(base), **FIXED | LEARNED | changes)


def test_only_the_state_is_trained(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loss falls below that from zero; a run that was stopped ends with the same bits."""
    held_out: dict[str, Any] = {
        "validation": "held_out",
        "eval_steps": 5,
        "eval_samples": 2,
        "eval_length": 96,
    }
    train(config(base, tmp_path / "one", **held_out))
    losses = [row["eval_loss"] for row in metrics(tmp_path / "one") if "eval_loss" in row]
    assert losses[1] < losses[0]
    assert [path.name for path in (tmp_path / "one").glob("*.safetensors")] == [STATE]
    model, before, tokens = load(tmp_path / "one"), load(base), torch.arange(9)[None]
    assert model.starting_from(None).fingerprint() == before.fingerprint()
    named = open_checkpoint(f"{base}+state({tmp_path / 'one' / STATE})")
    assert named.model.fingerprint() == model.fingerprint() != before.fingerprint()
    texts = [generate(one, tokens, max_new_tokens=8).tokens for one in (model, named.model, before)]
    assert texts[0] == texts[1] != texts[2]
    part = config(base, tmp_path / "two", **held_out)
    crash(part, 6, monkeypatch)
    train(part, resume=True)
    assert_same_run(tmp_path / "one", tmp_path / "two")
    assert load(last_checkpoint(tmp_path / "two")).fingerprint() == model.fingerprint()
    with pytest.raises(UserError, match="initial_state"):
        train_run(None, "initial_state.kind=zero", resume=tmp_path / "two")


def test_training_goes_on_from_a_state(base: Path, tmp_path: Path) -> None:
    train(config(base, tmp_path / "one", max_steps=2))
    name = f"{base}+state({tmp_path / 'one' / STATE})"
    rate: dict[str, Any] = {"max_steps": 1, "learning_rate": 1e-9}
    train(config(Path(name), tmp_path / "two", **rate))
    carry: dict[str, Any] = {"initial_state": {"kind": "carry"}}
    train(config(Path(name), tmp_path / "weights", **rate, **carry))
    started = load(name)
    tokens = torch.arange(9)[None]
    for folder in ("two", "weights"):
        found = load(tmp_path / folder)
        torch.testing.assert_close(found(tokens).logits, started(tokens).logits, atol=1e-4, rtol=0)
    assert (tmp_path / "weights/model.safetensors").is_file()
    with pytest.raises(UserError, match="checkpoint beside it"):
        load(f"{base}+state({tmp_path / 'weights' / STATE})")


@pytest.mark.slow
@pytest.mark.parametrize("flags", [CPU2, FSDP2], ids=["copies", "shards"])
def test_two_processes_train_like_one(flags: tuple[str, ...], base: Path, tmp_path: Path) -> None:
    task = {"kind": "text", "data": TEXTS if flags == CPU2 else str(BOOK)}
    configured = partial(config, base, task=task, max_steps=4, save_steps=3)
    assert_two_train_like_one(configured, tmp_path, flags)


def test_shards_refuse_several_documents_per_row(base: Path, tmp_path: Path) -> None:
    path = write_config(config(base, tmp_path / "run"), tmp_path / "config.yaml")
    done = launched("train", path, flags=FSDP2)
    assert (done.returncode, (tmp_path / "run").exists()) == (2, False)
    assert "without shards" in done.stderr
