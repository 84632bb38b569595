"""What one process or one step may not spoil: the other process, and what is saved."""

from __future__ import annotations

import copy
import resource
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from longrnn.errors import DivergedError
from longrnn.training import checkpoint
from longrnn.training.trainer import Trainer
from tests.training.forks import Fork, pair, rows
from tests.training.runs import assert_equal, assert_same_run, sick, tiny, train, write_config

LONG: dict[str, Any] = {"max_steps": 40, "save_steps": 1000, "logging_steps": 1}


def start(kind: str, output: Path, **changes: Any) -> list[Fork]:
    path = write_config(tiny(kind, output, **changes), output.with_suffix(".yaml"))
    return pair("train", path, "--quiet", folder=output.with_suffix(".log"))


def test_a_signal_to_one_process_stops_both_after_the_same_step(tmp_path: Path) -> None:
    """What they save is resumed to the same bits."""
    one, two = tmp_path / "one", tmp_path / "two"
    for process in start("carry", one, **LONG):
        process.end()
    both = start("carry", two, **LONG)
    assert both[0].when(lambda: rows(two) > 2)
    both[1].send(signal.SIGTERM)
    assert [process.end() for process in both] == [0, 0], both[0].err + both[1].err
    (stopped,) = checkpoint.checkpoints(two)
    assert 2 < checkpoint.steps(stopped) < 40
    assert {path.name for path in stopped.glob("carry-*")} == {"carry-0.pt", "carry-1.pt"}
    for process in pair("train", "--resume", two, "--quiet", folder=tmp_path / "log"):
        process.end()
    assert_same_run(one, two)


def test_a_skipped_step_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither in weights and optimizer, nor in the carried states, which would be those before."""
    whole, skipped = Trainer.train_step, []

    def watched(self: Trainer, *, stop: bool = False) -> dict[str, float]:
        kept = self.model.state_dict(), self.optimizer.state_dict()["state"]
        before = copy.deepcopy(kept)
        values = whole(self, stop=stop)
        if "loss" not in values:
            skipped.append(self.step)
            now = self.model.state_dict(), self.optimizer.state_dict()["state"]
            assert_equal(now, before)
            assert self.starts.content() == {}
        return values

    monkeypatch.setattr(Trainer, "train_step", watched)
    start = sick(tmp_path / "sick", "forwards", "carry", ord("2"))
    train(tiny("carry", tmp_path / "run", init_from=start, nonfinite="skip"))
    assert 0 < len(skipped) < 10


def test_weights_that_are_not_finite_are_not_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An update may overflow after a finite loss; the checkpoint before it is the newest."""
    whole = Trainer.train_step

    def overflowing(self: Trainer, *, stop: bool = False) -> dict[str, float]:
        values = whole(self, stop=stop)
        if self.step == 7:
            self.model.head.weight.data[0, 0] = torch.inf
        return values

    monkeypatch.setattr(Trainer, "train_step", overflowing)
    with pytest.raises(DivergedError, match="head.weight.*--resume"):
        train(tiny("reverse", tmp_path / "run"))
    assert [path.name for path in checkpoint.checkpoints(tmp_path / "run")] == [
        "checkpoint-00000004"
    ]


def test_a_disk_that_is_full_for_one_process_stops_both(tmp_path: Path) -> None:
    """The checkpoints before stay, and no part of a new one."""
    output = tmp_path / "run"
    both = start("carry", output, **LONG | {"max_steps": 300, "save_steps": 3})
    first = output / "checkpoint-00000003"
    assert both[1].when(first.exists)
    size, owner = (first / "carry-1.pt").stat().st_size - 50, both[1].process.pid
    assert owner is not None
    resource.prlimit(owner, resource.RLIMIT_FSIZE, (size, size))
    assert [process.end() for process in both] == [2, 2]
    assert all("too large" in process.err for process in both)
    assert checkpoint.newest(output) is not None
    assert not list(output.glob(".*"))
