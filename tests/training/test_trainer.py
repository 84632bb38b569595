"""The trainer in one process: what it learns, records and refuses."""

from __future__ import annotations

import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from longrnn import load
from longrnn.cells import MIXERS
from longrnn.errors import UserError
from longrnn.hf.load import load as load_checkpoint
from longrnn.models.checkpoint import save_model
from longrnn.tasks.passkey_prompts import QUESTION
from longrnn.training.config import TrainConfig
from longrnn.training.initial_states import Carry
from longrnn.training.trainer import Trainer
from tests.contracts.builders import mixer_spec
from tests.refusals import naming
from tests.training.runs import (
    BASE,
    KINDS,
    MAMBA2,
    assert_same_run,
    crash,
    last_checkpoint,
    metrics,
    tiny,
    train,
)


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
    with pytest.raises(UserError, match="max_grad_value"):
        tiny("reverse", tmp_path / "x", max_grad_value=-1)


def test_scores_are_those_of_the_step_of_their_row(tmp_path: Path) -> None:
    """Edit distances are computed for the steps that metrics.jsonl has; losses are means."""
    rows = {}
    for every in (1, 3):
        train(tiny("reverse", tmp_path / str(every), max_steps=7, logging_steps=every))
        rows[every] = {row["step"]: row for row in metrics(tmp_path / str(every))}
    assert list(rows[3]) == [3, 6, 7]
    for step, row in rows[3].items():
        for name in ("token_accuracy", "exact_match", "edit_distance"):
            assert row[name] == rows[1][step][name], (step, name)
    losses = [rows[1][step]["loss"] for step in (4, 5, 6)]
    assert rows[3][6]["loss"] == pytest.approx(sum(losses) / 3)


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


def test_a_folder_with_other_things_is_refused(tmp_path: Path) -> None:
    """A folder that is not empty and holds no run is refused."""
    mine = {".thesis.tex.0a1b2c3d", ".train.yaml.0a1b2c3d"}
    for name in mine:
        (tmp_path / name).write_text("x")
    for resume in (False, True):
        with pytest.raises(UserError):
            Trainer(tiny("reverse", tmp_path), resume=resume, quiet=True)
    assert {path.name for path in tmp_path.iterdir()} == mine


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"task": {"kind": "passky"}}, "passkey"),
        ({"task": {"kind": "passkey", "max_segment": 1}}, "max_segments"),
        ({"model": {**MAMBA2, "mixer": {"kind": "mamba"}}}, "mamba2"),
        ({"model": {**MAMBA2, "mixer": {"kind": "lstm", "d_state": 3}}}, "init"),
        ({"model": {**MAMBA2, "vocab_size": 200}}, "model.vocab_size=256"),
        ({"optim": "sgd"}, "adamw"),
        ({"lr_scheduler_type": "polynomial"}, "lr_scheduler_type"),
        ({"length": {"max": 50}}, "156"),
        (
            {"length": {"max": 9000, "min": 50, "sampling": "log_uniform"}},
            "156",
        ),
        ({"tokenizer": "nowhere"}, "tokenizer"),
        ({"init_from": "nowhere"}, "nowhere"),
        ({"freeze": ["*.A_lag"]}, naming("*.A_log")),
        ({"learning_rate_scale": {"heads.*": 2.0}}, "heads"),
        ({"num_processes": 2}, "processes"),
        (
            {"task": {"kind": "reverse"}, "initial_state": {"kind": "carry"}},
            "initial_state",
        ),
        ({"initial_state": {"kind": "cary"}}, "carry"),
        ({"initial_state": {"kind": "pass", "share": 1}}, "zero_share"),
        ({"initial_state": {"kind": "zero", "zero_share": 0.5}}, ""),
        ({"initial_state": {"kind": "pass", "zero_share": 1.5}}, ""),
        ({"initial_state": {"kind": "fitted_noise", "momentum": 1.0}}, ""),
        ({"initial_state": {"kind": "random_noise", "std": 0.0}}, ""),
        ({"initial_state": {}}, "'kind'"),
        ({"segments_per_step": 2}, "initial_state"),
        ({"segments_per_step": 0}, "segments_per_step"),
        ({"carry": True}, "initial_state"),
        ({"initial_state": {"kind": "carry"}, "batch_tokens": 9}, "length.sampling"),
        (
            {"initial_state": {"kind": "carry"}, "length": {"max": 180, "grow_steps": 3}},
            "length.sampling",
        ),
        ({"length": {"max": 180, "grow_steps": -1}}, "length.grow_steps"),
        ({"length": {"max": 180, "min": 50, "grow_steps": 9}}, "156"),
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

    with pytest.raises(UserError, match=naming("model.position.max_length", needed)) as error:
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
