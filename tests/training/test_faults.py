"""What one step or one process may not spoil: the weights, what is saved, and the other process."""

from __future__ import annotations

import resource
import signal
from pathlib import Path
from typing import Any

from longrnn.training import checkpoint
from tests.training.forks import Fork, pair, rows
from tests.training.runs import assert_same_run, tiny, write_config


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
