"""The trainer in one process: resuming bit for bit, refusing what it must, and learning."""

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
from longrnn.hf.loading import load as load_checkpoint
from longrnn.mixers import MIXERS
from longrnn.models.checkpoint import save_model
from longrnn.tasks.passkey_prompts import QUESTION
from longrnn.text import ByteTokenizer
from longrnn.training import checkpoint
from longrnn.training.config import TrainConfig
from longrnn.training.documents import build_corpus
from longrnn.training.initial_states import Carry
from longrnn.training.trainer import Trainer
from tests.contracts.builders import mixer_spec
from tests.training.runs import (
    BASE,
    KINDS,
    MAMBA2,
    assert_same_run,
    last_checkpoint,
    metrics,
    tiny,
    train,
)


class Crash(Exception):
    """What a test raises in the middle of a run."""


def crash(config: TrainConfig, step: int, monkeypatch: pytest.MonkeyPatch, **how: bool) -> None:
    """Trains until `step` steps are done, and then raises."""
    whole = Trainer._train_step

    def until(self: Trainer, *, stop: bool) -> dict[str, float]:
        if self.step == step:
            raise Crash
        return whole(self, stop=stop)

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "_train_step", until)
        with pytest.raises(Crash):
            train(config, **how)


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


def test_gradients_are_cut_by_value(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """max_grad_value clips entries after the norm was clipped."""
    seen = []
    whole = torch.optim.Adam.step

    def look(self: torch.optim.Adam, *args: Any) -> Any:
        seen.append(max(float(p.grad.abs().max()) for g in self.param_groups for p in g["params"]))
        return whole(self, *args)

    monkeypatch.setattr(torch.optim.Adam, "step", look)
    runs = {}
    for limit in (None, 1e-3):
        run = tmp_path / str(limit)
        train(tiny("reverse", run, max_steps=2, logging_steps=1, max_grad_value=limit))
        runs[limit] = [row["grad_norm"] for row in metrics(run)]
    assert min(seen[:2]) > 1e-3
    assert seen[2:] == pytest.approx([1e-3] * 2)
    assert runs[None][0] == runs[1e-3][0]  # what is logged is the norm before any clipping
    with pytest.raises(UserError, match="max_grad_value must be above 0, not -1"):
        tiny("reverse", tmp_path / "x", max_grad_value=-1)


def test_carried_states_reach_across_steps(tmp_path: Path) -> None:
    """With `carry`, the position counts the tokens of a document across steps."""
    config = tiny("carry", tmp_path, max_steps=6, task={"kind": "passkey", "max_segments": 50})
    trainer = train(config)
    assert isinstance(trainer.starts, Carry)
    states = [trainer.starts.states[micro] for micro in (0, 1)]
    positions = [int(p) for state in states for p in state.position]
    assert all(position % 180 == 0 for position in positions)
    assert max(positions) > 180
    starts = [trainer.source.segments(5, micro)[0].begins for micro in (0, 1)]
    is_document_start = [bool(flag) for flags in starts for flag in flags]
    for flag, position in zip(is_document_start, positions, strict=True):
        assert (position == 180) == flag
    assert not any(leaf.requires_grad for state in states for leaf in state.layers[0])


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
    with pytest.raises(UserError, match="the texts that .*checkpoint-00000004 .* have changed"):
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
    assert lines == [f"warning: {path}, line {n}, is damaged and left out" for n in (2, 3)]


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
    with pytest.raises(UserError, match="add --resume"):
        Trainer(tiny("reverse", tmp_path), quiet=True)
    for changes, name in [
        ({"learning_rate": 1e-4}, "learning_rate: 0.002 there, 0.0001 here"),
        ({"length": {"max": 9, "min": 4, "sampling": "log_uniform"}}, "length.max: 8 there, 9"),
        ({"model": {**KINDS["reverse"]["model"], "d_model": 12}}, "model.d_model: 16 there, 12"),
        ({"seed": 1}, "seed: 0 there, 1 here"),
    ]:
        with pytest.raises(UserError, match=f"{name}.*choose another output_dir"):
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
    with pytest.raises(UserError, match="holds 10 steps.*set max_steps=10 or more"):
        Trainer(tiny("carry", tmp_path / "b", max_steps=9, **constant), resume=True, quiet=True)
    assert (tmp_path / "b/train.yaml").read_text() == before


@pytest.mark.parametrize("schedule", ["cosine", "warmup_stable_decay"])
def test_a_run_whose_rate_knows_its_end_may_not(schedule: str, tmp_path: Path) -> None:
    """max_steps must not change if the schedule depends on it."""
    train(tiny("reverse", tmp_path, max_steps=2, lr_scheduler_type=schedule))
    for changed in (schedule, "constant"):
        longer = tiny("reverse", tmp_path, max_steps=4, lr_scheduler_type=changed)
        with pytest.raises(UserError, match=r"holds a run with another configuration \("):
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


def test_a_folder_with_other_things_is_refused(tmp_path: Path) -> None:
    """A folder that is not empty and holds no run is refused."""
    mine = {".thesis.tex.0a1b2c3d", ".train.yaml.0a1b2c3d"}
    for name in mine:
        (tmp_path / name).write_text("x")
    for resume in (False, True):
        with pytest.raises(UserError, match="not empty and holds no run"):
            Trainer(tiny("reverse", tmp_path), resume=resume, quiet=True)
    assert {path.name for path in tmp_path.iterdir()} == mine


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"task": {"kind": "passky"}}, "did you mean 'passkey'"),
        ({"task": {"kind": "passkey", "max_segment": 1}}, "did you mean 'max_segments'"),
        ({"model": {**MAMBA2, "mixer": {"kind": "mamba"}}}, "did you mean 'mamba2'"),
        ({"model": {**MAMBA2, "mixer": {"kind": "lstm", "d_state": 3}}}, "known: init"),
        ({"model": {**MAMBA2, "vocab_size": 200}}, "set model.vocab_size=256"),
        ({"optim": "sgd"}, "known: adam, adamw"),
        ({"lr_scheduler_type": "polynomial"}, "lr_scheduler_type"),
        ({"length": {"max": 50}}, "at least 156 tokens"),
        (
            {"length": {"max": 9000, "min": 50, "sampling": "log_uniform"}},
            "at least 156 tokens",
        ),
        ({"tokenizer": "nowhere"}, "no tokenizer at nowhere"),
        ({"init_from": "nowhere"}, "no checkpoint 'nowhere'"),
        ({"freeze": ["*.A_lag"]}, r"did you mean '\*.A_log'"),
        ({"learning_rate_scale": {"heads.*": 2.0}}, "no parameter matches 'heads"),
        ({"num_processes": 2}, "2 processes were requested and this one sees 1"),
        (
            {"task": {"kind": "reverse"}, "initial_state": {"kind": "carry"}},
            "initial_state={kind: zero}",
        ),
        ({"initial_state": {"kind": "cary"}}, "unknown initial state 'cary': did you mean 'carry'"),
        ({"initial_state": {"kind": "pass", "share": 1}}, "did you mean 'zero_share'"),
        ({"initial_state": {"kind": "zero", "zero_share": 0.5}}, "it takes none"),
        ({"initial_state": {"kind": "pass", "zero_share": 1.5}}, "between 0 and 1"),
        ({"initial_state": {"kind": "fitted_noise", "momentum": 1.0}}, "below 1"),
        ({"initial_state": {"kind": "random_noise", "std": 0.0}}, "above 0"),
        ({"initial_state": {}}, "'kind'"),
        ({"segments_per_step": 2}, "initial_state={kind: carry}"),
        ({"segments_per_step": 0}, "segments_per_step must be at least 1"),
        ({"carry": True}, "key carry was replaced: write initial_state={kind: carry} for true"),
        ({"initial_state": {"kind": "carry"}, "batch_tokens": 9}, "leave out length.sampling"),
        (
            {"initial_state": {"kind": "carry"}, "length": {"max": 180, "grow_steps": 3}},
            "leave out length.sampling",
        ),
        ({"length": {"max": 180, "grow_steps": -1}}, "length.grow_steps must be at least 0"),
        ({"length": {"max": 180, "min": 50, "grow_steps": 9}}, "at least 156 tokens"),
    ],
)
def test_bad_configurations_leave_nothing_behind(
    changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    """A bad configuration is refused before the output folder is created."""
    output = tmp_path / "run"
    with pytest.raises(UserError, match=message):
        Trainer(tiny("passkey", output, **changes), quiet=True)
    assert not output.exists()


@pytest.mark.parametrize("position", ["learned", "random"])
@pytest.mark.parametrize(
    ("kind", "changes", "needed"),
    [
        ("reverse", {}, 16),
        ("passkey", {"max_steps": 2}, 180 + len(" 1234")),
        # No document has more segments than the run has steps; a question is on a fork.
        ("carry", {"max_steps": 3}, 3 * 180 + len(QUESTION + " 1234")),
        ("carry", {"max_steps": 12}, 4 * 180 + len(QUESTION + " 1234")),
    ],
)
def test_positions_that_end_too_early_leave_nothing_behind(
    position: str, kind: str, changes: dict[str, Any], needed: int, tmp_path: Path
) -> None:
    """A table of positions that the run would exceed is refused, and no other."""

    def config(max_length: int) -> TrainConfig:
        table = {"kind": position, "max_length": max_length}
        model = {**KINDS[kind]["model"], "position": table}
        return tiny(kind, tmp_path / "run", model=model, **changes)

    with pytest.raises(UserError, match=f"set model.position.max_length={needed}") as error:
        Trainer(config(needed - 1), quiet=True)
    assert "\n" not in str(error.value)
    assert not (tmp_path / "run").exists()
    train(config(needed))


@pytest.mark.parametrize("kind", sorted(MIXERS))
def test_bf16_mixed_precision_trains_every_cell(kind: str, tmp_path: Path) -> None:
    """Every cell trains under bf16, with finite losses."""
    spec = {**MAMBA2, "mixer": mixer_spec(kind)}
    changes = {"model": spec, "mixed_precision": "bf16", "max_steps": 4, "logging_steps": 1}
    trainer = train(tiny("carry", tmp_path, **changes))
    rows = metrics(tmp_path)
    assert len(rows) == 4
    assert all(math.isfinite(row["loss"]) and 0 < row["grad_norm"] < 100 for row in rows)
    assert {p.dtype for p in trainer.accelerator.unwrap_model(trainer.objective).parameters()} == {
        torch.float32
    }


def test_the_loss_goes_down(tmp_path: Path) -> None:
    """Training reduces the loss below chance."""
    changes = {
        "length": {"max": 2},
        "max_steps": 120,
        "logging_steps": 10,
        "per_device_train_batch_size": 32,
        "learning_rate": 3e-2,
        "save_steps": 1000,
    }
    train(tiny("reverse", tmp_path, **changes))
    rows = metrics(tmp_path)
    assert rows[0]["loss"] > 1.8  # ln 8 = 2.08
    assert rows[-1]["loss"] < 0.5
    assert rows[-1]["token_accuracy"] > 0.85


def test_metrics_say_what_was_done(tmp_path: Path) -> None:
    """Every row counts the tokens and rates of its own step."""
    train(tiny("passkey", tmp_path))
    rows = metrics(tmp_path)
    width = 180 + len(" 12345") - 1
    assert [row["tokens"] for row in rows] == [step * 2 * width for step in (3, 6, 9, 10)]
    assert rows[0]["learning_rate"] == BASE_RATE  # the third step ends the warm-up
    assert 0 < rows[-1]["learning_rate"] < 0.2 * BASE_RATE
    assert 4 < rows[0]["loss"] < 14  # text and answer, each near ln 256 = 5.5 at first


BASE_RATE = TrainConfig().learning_rate


def test_init_from_starts_where_another_run_ended(tmp_path: Path) -> None:
    """Fine-tuning starts from the weights of the checkpoint, with its model."""
    train(tiny("reverse", tmp_path / "first"))
    changes = {"init_from": str(tmp_path / "first"), "max_steps": 1}
    config = tiny("reverse", tmp_path / "second", learning_rate=1e-9, **changes)
    trainer = train(config)
    first, second = load(tmp_path / "first"), load(tmp_path / "second")
    assert second.config == first.config
    assert trainer.config.model == first.config
    for name, value in second.state_dict().items():
        torch.testing.assert_close(value, first.state_dict()[name], atol=1e-6, rtol=0)
    # The run goes on from its own checkpoint, not from the start again.
    shutil.rmtree(tmp_path / "first")
    again = tiny("reverse", tmp_path / "second", learning_rate=1e-9, **changes)
    resumed = Trainer(again, resume=True, quiet=True)
    assert resumed.step == 1


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
    with pytest.raises(UserError, match=f"no checkpoint '{first}'"):
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
    with pytest.raises(UserError, match="does not fit the model and optimizer of this run"):
        Trainer(tiny("reverse", tmp_path), resume=True, quiet=True)


@pytest.mark.parametrize("text", ["", "- 1", "a: [", "\x00", "3"])
def test_a_damaged_record_of_the_configuration_is_refused(text: str, tmp_path: Path) -> None:
    """A damaged train.yaml is refused in one sentence, and nothing changes."""
    train(tiny("reverse", tmp_path, max_steps=1))
    (tmp_path / "train.yaml").write_text(text)
    with pytest.raises(UserError, match="train.yaml .*put it back from a copy"):
        Trainer(tiny("reverse", tmp_path, max_steps=1), resume=True, quiet=True)
    assert (tmp_path / "train.yaml").read_text() == text


def test_fine_tuning_with_frozen_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Frozen parameters never change, and scales survive a resume."""
    train(tiny("passkey", tmp_path / "first", max_steps=1))
    changes = {
        "init_from": str(tmp_path / "first"),
        "freeze": ["embedding.weight", "blocks.0.*"],
        "learning_rate_scale": {"*.dt_bias": 10.0},
        "weight_decay": 0.1,
        "fill": {"blocks.0.*.A_log": 2.5, "blocks.1.*.A_log": 1.5},
    }
    straight, broken = (tiny("carry", tmp_path / name, **changes) for name in ("a", "b"))
    trainer = train(straight)
    crash(broken, 6, monkeypatch)
    train(broken, resume=True)
    assert_same_run(tmp_path / "a", tmp_path / "b")
    before, after = (load(tmp_path / name).state_dict() for name in ("first", "b"))
    for name, value in after.items():
        frozen = name in ("embedding.weight", "head.weight") or name.startswith("blocks.0.")
        if name == "blocks.0.mixer.A_log":
            before[name] = torch.full_like(value, 2.5)
        assert torch.equal(value, before[name]) == frozen, name
    # Filled once: a resume goes on from what training made of it.
    trained = after["blocks.1.mixer.A_log"]
    assert not torch.equal(trained, torch.full_like(trained, 1.5))
    scales = {group["scale"]: group["lr"] for group in trainer.optimizer.param_groups}
    assert scales.keys() == {1.0, 10.0}
    assert scales[10.0] == pytest.approx(10 * scales[1.0])


def test_training_with_a_tokenizer_of_ones_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A checkpoint carries its tokenizer, and loads from another folder."""
    from longrnn import load_tokenizer
    from tests.tasks.test_passkey import trained_bpe

    bpe: Any = trained_bpe()
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    bpe.tokenizer.save_pretrained("bpe")
    model = {**MAMBA2, "vocab_size": bpe.vocab_size}
    train(tiny("passkey", Path("run"), tokenizer="bpe", model=model, max_steps=2))
    monkeypatch.chdir(tmp_path)
    for folder in (Path("work/run"), last_checkpoint(Path("work/run"))):
        tokenizer = load_tokenizer(folder)
        assert tokenizer.vocab_size == bpe.vocab_size
        assert tokenizer.encode("The passkey is 12345.") == bpe.encode("The passkey is 12345.")
        assert load_checkpoint(folder).vocab_size == bpe.vocab_size


def test_a_seed_gives_one_model(tmp_path: Path) -> None:
    """A seed determines weights and batches."""
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        torch.manual_seed(hash(name) % 1000)
        train(tiny("passkey", tmp_path / name, max_steps=2, seed=seed))
    weights = [(tmp_path / name / "model.safetensors").read_bytes() for name in "abc"]
    assert weights[0] == weights[1] != weights[2]


def test_save_model_and_the_run_agree(tmp_path: Path) -> None:
    """The saved final model equals the one in memory."""
    trainer = train(tiny("passkey", tmp_path / "run", max_steps=BASE["warmup_steps"]))
    model = trainer.accelerator.unwrap_model(trainer.objective).model
    save_model(model, tmp_path / "again")
    files = [tmp_path / name / "model.safetensors" for name in ("run", "again")]
    assert files[0].read_bytes() == files[1].read_bytes()
