"""What one step or one process may not spoil: the weights, what is saved, and the other process."""

from __future__ import annotations

import resource
import signal
from pathlib import Path
from typing import Any

import pytest

from longrnn.errors import DivergedError
from longrnn.training import checkpoint
from tests.training.forks import Fork, pair, rows
from tests.training.runs import assert_same_run, metrics, sick, tiny, train, write_config


def test_after_a_skipped_step_carried_rows_start_from_zero(tmp_path: Path) -> None:
    """The states that they carried are those before it."""
    how = {"nonfinite": "skip", "logging_steps": 1, "save_steps": 1, "save_total_limit": 10}
    how["init_from"] = sick(tmp_path / "sick", "forwards", "carry", ord("2"))
    train(tiny("carry", tmp_path / "run", **how))
    skipped = [int(row["step"]) for row in metrics(tmp_path / "run") if "loss" not in row]
    folders = [tmp_path / "run" / f"checkpoint-{step:08d}" for step in skipped]
    assert 0 < len(skipped) < 10
    assert not any(checkpoint.read_tensors(folder / "carry-0.pt") for folder in folders)


def test_weights_that_overflow_are_not_saved(tmp_path: Path) -> None:
    """Though the loss and the gradients before the update are finite."""
    how = {"learning_rate": 1e39, "warmup_steps": 0, "save_steps": 1}
    with pytest.raises(DivergedError, match="weight.*--resume"):
        train(tiny("reverse", tmp_path / "run", **how))
    assert not checkpoint.checkpoints(tmp_path / "run")


def start(output: Path, **changes: Any) -> list[Fork]:
    path = write_config(tiny("carry", output, **changes), output.with_suffix(".yaml"))
    return pair("--quiet", "train", path, folder=output.with_suffix(".log"))


def test_a_signal_to_one_of_two_processes_stops_both(tmp_path: Path) -> None:
    """After the same step, which is saved and resumed to the same bits."""
    one, two, how = tmp_path / "one", tmp_path / "two", {"max_steps": 40, "save_steps": 40}
    assert [process.end() for process in start(one, logging_steps=1, **how)] == [0, 0]
    both = start(two, logging_steps=1, **how)
    assert both[0].when(lambda: rows(two) > 2)
    both[1].send(signal.SIGTERM)
    assert [process.end() for process in both] == [0, 0]
    assert len(checkpoint.checkpoints(two)) == 1
    resumed = pair("--quiet", "train", "--resume", two, folder=tmp_path / "log")
    assert [process.end() for process in resumed] == [0, 0]
    assert_same_run(one, two)


def test_a_disk_that_is_full_for_one_of_two_processes_stops_both(tmp_path: Path) -> None:
    """The checkpoints before stay, and no part of a new one."""
    both = start(tmp_path / "run", max_steps=300, save_steps=3)
    first = tmp_path / "run/checkpoint-00000003"
    assert both[1].when(first.exists)
    size = (first / "carry-1.pt").stat().st_size - 50
    resource.prlimit(both[1].process.pid or 0, resource.RLIMIT_FSIZE, (size, size))
    assert [process.end() for process in both] == [2, 2]
    assert checkpoint.newest(tmp_path / "run") is not None
    assert not list((tmp_path / "run").glob(".*"))
