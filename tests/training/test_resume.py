"""Resuming a run: bit for bit the undisturbed one, or refused with the reason."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from longrnn import load
from longrnn.config import load_config
from longrnn.errors import UserError
from longrnn.files import sha256
from longrnn.text import ByteTokenizer
from longrnn.training import checkpoint
from longrnn.training.config import TrainConfig
from longrnn.training.documents import build_corpus
from longrnn.training.trainer import Trainer
from tests.refusals import naming
from tests.training.runs import (
    KINDS,
    assert_same_run,
    crash,
    last_checkpoint,
    metrics,
    tiny,
    train,
)

pytestmark = pytest.mark.core


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_a_resumed_run_is_the_undisturbed_one(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A resumed run ends bit for bit where an undisturbed one does.

    The first crash leaves rows of metrics that must be dropped, the second a mean half collected.
    """
    straight, broken = tiny(kind, tmp_path / "straight"), tiny(kind, tmp_path / "broken")
    train(straight)
    crash(broken, 7, monkeypatch)
    assert [row["step"] for row in metrics(tmp_path / "broken")] == [3, 6]
    crash(broken, 9, monkeypatch, resume=True)
    assert last_checkpoint(tmp_path / "broken").name == "checkpoint-00000008"
    trainer = train(broken, resume=True)
    assert (trainer.step, trainer.tokens > 0) == (10, True)
    assert_same_run(tmp_path / "straight", tmp_path / "broken")
    rows = metrics(tmp_path / "straight")
    assert [row["step"] for row in rows] == [3, 6, 9, 10]
    assert all(math.isfinite(value) for row in rows for value in row.values())


def test_checkpoints_are_kept_to_the_limit_and_load(tmp_path: Path) -> None:
    """The newest save_total_limit checkpoints are kept, and `load` reads them."""
    train(tiny("passkey", tmp_path, save_steps=2, save_total_limit=3))
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == [
        "README.md",
        *(f"checkpoint-{step:08d}" for step in (6, 8, 10)),
        "checksums.json",
        "config.json",
        "metrics.jsonl",
        "model.safetensors",
        "train.yaml",
    ]
    final, last = load(tmp_path), load(last_checkpoint(tmp_path))
    assert final.fingerprint() == last.fingerprint()
    assert load(tmp_path / "checkpoint-00000008").fingerprint() != final.fingerprint()


def test_a_finished_run_can_be_resumed(tmp_path: Path) -> None:
    """Resuming a finished run changes nothing."""
    config = tiny("reverse", tmp_path)
    train(config)
    before = (tmp_path / "model.safetensors").read_bytes(), metrics(tmp_path)
    train(config, resume=True)
    assert ((tmp_path / "model.safetensors").read_bytes(), metrics(tmp_path)) == before


@pytest.mark.parametrize("kind", ["text", "corpus", "passkey"])
def test_texts_that_changed_are_refused(kind: str, tmp_path: Path) -> None:
    """A resume with changed texts is refused."""
    text, built = tmp_path / "text.txt", tmp_path / "corpus"
    text.write_text("to be or not to be, " * 40)
    tasks = {
        "text": {"kind": "text", "files": [str(text)]},
        "corpus": {"kind": "text", "corpus": str(built)},
        "passkey": {"kind": "passkey", "filler": str(text)},
    }
    length = {"max": 180 if kind == "passkey" else 32}
    build_corpus([text], ByteTokenizer(), built, name="bytes", quiet=True)
    config = tiny("streams", tmp_path / "run", task=tasks[kind], length=length, max_steps=4)
    config.initial_state = {"kind": "zero"}
    config.segments_per_step = config.gradient_accumulation_steps = 1
    train(config)
    train(config, resume=True)
    text.write_text("that is the question " * 40)
    shutil.rmtree(built)
    build_corpus([text], ByteTokenizer(), built, name="bytes", quiet=True)
    with pytest.raises(UserError, match="checkpoint-00000004"):
        train(config, resume=True)


def test_the_scale_of_float16_is_kept(tmp_path: Path) -> None:
    """A resumed run keeps the loss scale."""

    trainer = train(tiny("reverse", tmp_path))
    scaler = trainer.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    trainer.step += 1
    trainer._save()
    scaler.load_state_dict({**scaler.state_dict(), "scale": 2.0})
    trainer.restore(last_checkpoint(tmp_path))
    assert scaler.get_scale() == 8.0


def test_resume_without_a_checkpoint_begins_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a checkpoint, a resume starts from step 0 with empty metrics."""
    straight, broken = tiny("reverse", tmp_path / "a"), tiny("reverse", tmp_path / "b")
    train(straight)
    crash(broken, 3, monkeypatch)
    assert len(metrics(tmp_path / "b")) == 1
    train(broken, resume=True)
    assert_same_run(tmp_path / "a", tmp_path / "b")
    train(tiny("reverse", tmp_path / "c"), resume=True)  # nothing there at all
    assert_same_run(tmp_path / "a", tmp_path / "c")


def test_a_torn_row_of_metrics_is_dropped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Resume continues from the last complete row of metrics."""
    config = tiny("reverse", tmp_path)
    crash(config, 9, monkeypatch)
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write('{"step": 7, "lo')
    train(config, resume=True)
    assert [row["step"] for row in metrics(tmp_path)] == [3, 6, 9, 10]


def test_a_damaged_row_of_metrics_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A damaged row is named and dropped, and the run continues."""
    config = tiny("reverse", tmp_path)
    train(config)
    path = tmp_path / "metrics.jsonl"
    first, second, *rest = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([first, second[:9] + b"\xff" + second[10:], b"3\n", *rest]))
    train(config, resume=True)
    assert [row["step"] for row in metrics(tmp_path)] == [3, 9, 10]
    lines = capsys.readouterr().err.splitlines()
    for number, line in zip((2, 3), lines, strict=True):
        assert f"{path}, line {number}," in line


def test_what_a_killed_save_left_does_no_harm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A half-written checkpoint is neither resumed from nor published."""
    straight, broken = tiny("reverse", tmp_path / "a"), tiny("reverse", tmp_path / "b")
    train(straight)
    crash(broken, 6, monkeypatch)
    for step in (5, 8):
        partial = tmp_path / f"b/.checkpoint-{step:08d}.partial"
        partial.mkdir()
        (partial / ".model.safetensors.0a1b2c3d").write_bytes(b"torn")
    train(broken, resume=True)
    assert_same_run(tmp_path / "a", tmp_path / "b")
    assert not list((tmp_path / "b").rglob("*.partial"))
    assert not list((tmp_path / "b").rglob("*0a1b2c3d"))


def test_another_run_in_the_folder_is_refused(tmp_path: Path) -> None:
    """A folder with the run of another configuration is refused."""
    train(tiny("reverse", tmp_path))
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    with pytest.raises(UserError, match="--resume"):
        Trainer(tiny("reverse", tmp_path), quiet=True)
    for changes, name in [
        ({"learning_rate": 1e-4}, "learning_rate: 0.002 there, 0.0001 here"),
        ({"length": {"max": 9, "min": 4, "sampling": "log_uniform"}}, "length.max: 8 there, 9"),
        ({"model": {**KINDS["reverse"]["model"], "d_model": 12}}, "model.d_model: 16 there, 12"),
        ({"seed": 1}, "seed: 0 there, 1 here"),
    ]:
        with pytest.raises(UserError, match=naming(name, "output_dir")):
            Trainer(tiny("reverse", tmp_path, **changes), resume=True, quiet=True)
    after = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    assert after == before


def test_how_often_to_save_and_log_may_change(tmp_path: Path) -> None:
    """A resumed run may change how often it saves and logs."""
    train(tiny("reverse", tmp_path))
    harmless = {"save_steps": 3, "save_total_limit": 1, "logging_steps": 1, "num_processes": 1}
    train(tiny("reverse", tmp_path, **harmless), resume=True)


def test_a_run_with_a_constant_rate_may_become_longer(tmp_path: Path) -> None:
    """With a constant rate, an extended run ends where a long run does.

    Its metrics have one row more, that of the step that was once the last.
    """
    constant = {"lr_scheduler_type": "constant"}
    straight, longer = (tiny("carry", tmp_path / name, **constant) for name in ("a", "b"))
    train(straight)
    train(tiny("carry", tmp_path / "b", max_steps=5, **constant))
    assert train(longer, resume=True).step == 10
    names = ("model.safetensors", "checkpoint-00000010/carry-0.pt")
    for name in names:
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()
    assert [row["step"] for row in metrics(tmp_path / "b")] == [3, 5, 6, 9, 10]
    # Fewer steps than there are would be a run that ends where it says it does not.
    before = (tmp_path / "b/train.yaml").read_text()
    with pytest.raises(UserError, match=naming("max_steps", 10)):
        Trainer(tiny("carry", tmp_path / "b", max_steps=9, **constant), resume=True, quiet=True)
    assert (tmp_path / "b/train.yaml").read_text() == before


@pytest.mark.parametrize("schedule", ["cosine", "warmup_stable_decay"])
def test_a_run_whose_rate_knows_its_end_may_not(schedule: str, tmp_path: Path) -> None:
    """max_steps must not change if the schedule depends on it."""
    warmup = {"warmup_steps": 0}
    train(tiny("reverse", tmp_path, max_steps=2, lr_scheduler_type=schedule, **warmup))
    for changed, remedy in ((schedule, "--extend-to"), ("constant", "output_dir")):
        longer = tiny("reverse", tmp_path, max_steps=4, lr_scheduler_type=changed, **warmup)
        with pytest.raises(UserError, match=remedy):
            Trainer(longer, resume=True, quiet=True)


@pytest.mark.parametrize("resume", [False, True])
def test_a_kill_while_the_folder_is_claimed_does_no_harm(tmp_path: Path, resume: bool) -> None:
    """A half-written train.yaml does not prevent the run from starting."""
    (tmp_path / ".train.yaml.0a1b2c3d").write_text("output_d")
    train(tiny("reverse", tmp_path, max_steps=1), resume=resume)
    (tmp_path / ".model.safetensors.0a1b2c3d").write_text("half")
    (tmp_path / ".mine").write_text("x")
    train(tiny("reverse", tmp_path, max_steps=1), resume=True)
    assert [path.name for path in tmp_path.glob(".*")] == [".mine"]


@pytest.mark.parametrize("kind", ["carry", "transformer"])
def test_a_resume_needs_no_init_from(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A resumed run is identical bit for bit also if `init_from` was deleted."""
    from tests.hf.foreign import causal, with_bytes

    first, changes = str(tmp_path / "first"), dict(KINDS["carry"])
    del changes["model"]
    if kind == "transformer":
        with_bytes(causal("llama", vocab_size=256, max_position_embeddings=256), Path(first))
        changes |= {"initial_state": {"kind": "zero"}, "task": {"kind": "passkey"}}
    else:
        train(tiny("passkey", Path(first), max_steps=1))
    changes |= {"init_from": first, "max_steps": 6, "save_steps": 2}
    straight, broken = (tiny("carry", tmp_path / name, **changes) for name in ("a", "b"))
    train(straight)
    crash(broken, 3, monkeypatch)
    shutil.rmtree(first)
    train(tiny("carry", tmp_path / "b", **changes), resume=True)
    assert_same_run(tmp_path / "a", tmp_path / "b")
    # Before the first checkpoint there is nothing else to start from.
    early = tiny("carry", tmp_path / "c", **changes)
    with pytest.raises(UserError, match=naming(first)):
        Trainer(early, resume=True, quiet=True)
    # What the run recorded is a configuration to resume with.
    again = load_config(TrainConfig, tmp_path / "b/train.yaml")
    assert Trainer(again, resume=True, quiet=True).step == 6


def rewritten(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Changes what `training.pt` of a checkpoint holds, and its checksum."""
    content = checkpoint.read_tensors(folder / "training.pt")
    checkpoint.write_tensors(folder / "training.pt", change(content) or content)
    path = folder / "checksums.json"
    digests = json.loads(path.read_text())
    digests["training.pt"] = sha256(folder / "training.pt")
    path.write_text(json.dumps(digests))


def test_checkpoints_of_other_formats(tmp_path: Path) -> None:
    """Earlier formats are resumed, unknown ones refused in one sentence with the way on."""
    train(tiny("reverse", tmp_path))
    folder = last_checkpoint(tmp_path)

    def first(content: dict[str, Any]) -> None:
        for name in ("format", "skipped", "skipped_in_a_row"):
            del content[name]

    rewritten(folder, first)
    trainer = Trainer(tiny("reverse", tmp_path), resume=True, quiet=True)
    assert (trainer.step, trainer.skipped) == (10, 0)
    for change, message in [
        (lambda content: content.pop("data") and None, "lacks data: start a new run"),
        (lambda content: content.update(format=99), "has checkpoint format 99, and this version"),
        (lambda content: [content], "has checkpoint format None"),
    ]:
        whole = {"data": "", "format": 2, "skipped": 0, "skipped_in_a_row": 0}
        rewritten(folder, lambda content, whole=whole: content.update(whole))
        rewritten(folder, change)
        with pytest.raises(UserError, match=message) as refusal:
            Trainer(tiny("reverse", tmp_path), resume=True, quiet=True)
        assert f"init_from={folder}" in str(refusal.value)


def test_an_optimizer_of_another_version_is_refused(tmp_path: Path) -> None:
    """Parameter groups that do not fit are refused in one sentence."""
    train(tiny("reverse", tmp_path))
    rewritten(last_checkpoint(tmp_path), lambda c: c["optimizer"]["param_groups"].pop() and None)
    with pytest.raises(UserError):
        Trainer(tiny("reverse", tmp_path), resume=True, quiet=True)


@pytest.mark.parametrize("text", ["", "- 1", "a: [", "\x00", "3"])
def test_a_damaged_record_of_the_configuration_is_refused(text: str, tmp_path: Path) -> None:
    """A damaged train.yaml is refused in one sentence, and nothing changes."""
    train(tiny("reverse", tmp_path, max_steps=1))
    (tmp_path / "train.yaml").write_text(text)
    with pytest.raises(UserError, match="train.yaml"):
        Trainer(tiny("reverse", tmp_path, max_steps=1), resume=True, quiet=True)
    assert (tmp_path / "train.yaml").read_text() == text
