"""Runs that become longer, and runs that continue from a checkpoint of another one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from longrnn.errors import UserError
from longrnn.training import checkpoint
from longrnn.training.extension import extended
from longrnn.training.trainer import Trainer
from tests.cli.conftest import CLI, cli  # noqa: F401
from tests.training.runs import (
    assert_same_run,
    crash,
    last_checkpoint,
    metrics,
    tiny,
    train,
    write_config,
)

DECAYING: dict[str, Any] = {
    "lr_scheduler_type": "warmup_stable_decay",
    "warmup_steps": 1,
    "logging_steps": 1,
    "save_total_limit": 1,
    "save_steps": 3,
}


def extend(config: Any, steps: int) -> Trainer:
    trainer = Trainer(extended(config, steps), quiet=True, extend=True)
    trainer.train()
    return trainer


def test_a_decayed_run_becomes_longer_as_if_it_had_been_planned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An extended run decays once, at its new end, and equals a run of that length."""
    long = tiny("streams", tmp_path / "long", max_steps=9, decay_steps=2, **DECAYING)
    short = tiny("streams", tmp_path / "short", max_steps=6, decay_steps=2, **DECAYING)
    train(long)
    train(short)
    kept = [path.name for path in checkpoint.checkpoints(tmp_path / "short")]
    assert kept == ["checkpoint-00000004", "checkpoint-00000006"], "that before the decay stays"
    first = Trainer(extended(short, 9), quiet=True, extend=True)
    assert first.step == 4
    first.lock.release()
    # Interrupted, it goes on from where it was, and does not decay again.
    crash(extended(short, 9), 8, monkeypatch, resume=True)
    again = Trainer(extended(short, 9), quiet=True, extend=True)
    assert again.step == 7
    again.lock.release()
    extend(short, 9)
    assert_same_run(tmp_path / "long", tmp_path / "short")
    assert (tmp_path / "short/checkpoint-00000006.decayed").is_dir()


def test_a_finished_run_is_prolonged_with_its_optimizer(cli: CLI, tmp_path: Path) -> None:  # noqa: F811
    """`--extend-to` continues a finished run; the rate is that of the longer schedule."""
    config = tiny("carry", Path("run"), max_steps=4, lr_scheduler_type="linear", logging_steps=1)
    write_config(config, tmp_path / "c.yaml")
    refused = cli("train", "c.yaml", "--quiet", "--extend-to", "6")
    assert (refused.code, refused.out) == (2, "")
    assert cli("train", "c.yaml", "--quiet").code == 0
    done = cli("train", "c.yaml", "--quiet", "--extend-to", "6")
    assert done.code == 0, done.err
    rates = [row["learning_rate"] for row in metrics(tmp_path / "run")]
    # Warm-up of 3 steps, then linear to 0 after 4 and after 6 steps.
    assert rates == pytest.approx([2e-3 * f for f in (1 / 3, 2 / 3, 1, 1, 2 / 3, 1 / 3)])
    assert (tmp_path / "run/train-until-00000004.yaml").is_file()
    shorter = cli("train", "c.yaml", "--quiet", "--extend-to", "5")
    assert (shorter.code, shorter.out) == (2, "")
    assert "--extend-to" in shorter.err


def test_a_decay_starts_from_any_checkpoint(tmp_path: Path) -> None:
    """A branch from a checkpoint equals a run that was planned with this decay."""
    planned = tiny("streams", tmp_path / "planned", max_steps=8, decay_steps=2, **DECAYING)
    stable = tiny("streams", tmp_path / "stable", max_steps=20, decay_steps=9, **DECAYING)
    train(planned)
    trainer = Trainer(stable, quiet=True)
    for _ in range(6):
        trainer._train_step(stop=False)
        trainer.step += 1
    trainer._save()
    trainer.lock.release()
    origin = last_checkpoint(tmp_path / "stable")
    changes = {**DECAYING, "resume_from_checkpoint": str(origin)}
    train(tiny("streams", tmp_path / "branch", max_steps=8, decay_steps=2, **changes))
    names = ("model.safetensors", "checkpoint-00000008/carry-0.pt")
    for name in names:
        one, other = (tmp_path / run / name for run in ("planned", "branch"))
        assert one.read_bytes() == other.read_bytes()
    assert metrics(tmp_path / "branch")[-1]["loss"] == metrics(tmp_path / "planned")[-1]["loss"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"resume_from_checkpoint": "nowhere"}, "checkpoint"),
        ({"learning_rate": 1e-4, "seed": 7}, "seed"),
        ({"max_steps": 1}, "max_steps=1"),
    ],
)
def test_a_checkpoint_of_another_run_is_refused(
    changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    """Only the schedule may differ from the run of `resume_from_checkpoint`."""
    train(tiny("reverse", tmp_path / "one", max_steps=2))
    origin = str(tmp_path / "one/checkpoint-00000002")
    config = tiny("reverse", tmp_path / "two", **{"resume_from_checkpoint": origin, **changes})
    with pytest.raises(UserError, match=message):
        Trainer(config, quiet=True)
    assert not (tmp_path / "two").exists()


def test_without_a_checkpoint_before_the_decay_nothing_changes(tmp_path: Path) -> None:
    """A run whose early checkpoints are lost is refused with what to do."""
    short = tiny("reverse", tmp_path, max_steps=4, decay_steps=2, **DECAYING)
    train(short)
    for folder in checkpoint.checkpoints(tmp_path)[:-1]:
        folder.rename(tmp_path / f"lost-{folder.name}")
    with pytest.raises(UserError):
        extend(short, 9)
    assert last_checkpoint(tmp_path).name == "checkpoint-00000004"
