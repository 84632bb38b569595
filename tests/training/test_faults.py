"""What happens in one process, or on a full disk, stops the others and loses nothing saved."""

import resource
import signal
from pathlib import Path
from typing import Any

import pytest

from longrnn.training import checkpoint
from tests.training.forks import Fork, group, rows, run
from tests.training.runs import assert_same_run, metrics, sick, tiny, train, write_config


def test_a_step_that_is_not_finite_in_one_process_is_skipped_by_both(tmp_path: Path) -> None:
    how = {"nonfinite": "skip", "logging_steps": 1, "max_steps": 8, "length": {"max": 2}}
    how["init_from"] = sick(tmp_path / "sick", "forwards")
    train(tiny("reverse", tmp_path / "one", per_device_train_batch_size=2, **how))
    config = tiny("reverse", tmp_path / "two", per_device_train_batch_size=1, **how)
    path = write_config(config, tmp_path / "config.yaml")
    assert [one.end() for one in group("--quiet", "train", path, folder=tmp_path / "log")] == [0, 0]
    expected, found = (metrics(tmp_path / name) for name in ("one", "two"))
    assert 0 < expected[-1]["skipped"] < 8
    for row, wanted in zip(found, expected, strict=True):
        assert row == pytest.approx(wanted, rel=1e-4, abs=1e-5)


def start(output: Path, **changes: Any) -> list[Fork]:
    path = write_config(tiny("carry", output, **changes), output.with_suffix(".yaml"))
    return group("--quiet", "train", path, folder=output.with_suffix(".log"))


def test_a_signal_to_one_of_two_processes_stops_both(tmp_path: Path) -> None:
    """After the same step, which is saved and resumed to the same bits."""
    one, two, how = tmp_path / "one", tmp_path / "two", {"max_steps": 20, "save_steps": 20}
    assert [process.end() for process in start(one, logging_steps=1, **how)] == [0, 0]
    both = start(two, logging_steps=1, **how)
    assert both[0].when(lambda: rows(two) > 2)
    both[1].send(signal.SIGTERM)
    assert [process.end() for process in both] == [0, 0]
    assert len(checkpoint.checkpoints(two)) == 1
    resumed = group("--quiet", "train", "--resume", two, folder=tmp_path / "log")
    assert [process.end() for process in resumed] == [0, 0]
    assert_same_run(one, two)


@pytest.mark.parametrize(
    ("full", "room"),
    [
        ("model.safetensors", -50),
        pytest.param("metrics.jsonl", 20, marks=pytest.mark.slow),
    ],
)
def test_a_full_disk_is_named_and_loses_no_checkpoint(full: str, room: int, tmp_path: Path) -> None:
    """A torn row or part of a checkpoint is written again when the run continues."""
    how = {"max_steps": 100, "save_steps": 20, "length": {"max": 6}, "logging_steps": 5}
    train(tiny("reverse", tmp_path / "one", **how))
    path = write_config(tiny("reverse", tmp_path / "run", **how), tmp_path / "config.yaml")
    process = Fork("train", path, folder=tmp_path / "log")
    first = tmp_path / "run/checkpoint-00000020"
    assert process.when(first.exists)
    size = (tmp_path / "run" if room > 0 else first).joinpath(full).stat().st_size + room
    resource.prlimit(process.process.pid or 0, resource.RLIMIT_FSIZE, (size, size))
    assert process.end() == 2
    assert f"/{full}" in process.err
    assert checkpoint.checkpoints(tmp_path / "run")
    assert not list((tmp_path / "run").glob(".*"))
    assert run("train", "--resume", tmp_path / "run").returncode == 0
    assert_same_run(tmp_path / "one", tmp_path / "run")


def test_a_disk_that_is_full_for_one_of_two_processes_stops_both(tmp_path: Path) -> None:
    """The checkpoints before stay, and no part of a new one."""
    both = start(tmp_path / "run", max_steps=300, save_steps=3)
    first = tmp_path / "run/checkpoint-00000003"
    assert both[1].when(first.exists)
    size = (first / "carry-1.pt").stat().st_size - 50
    resource.prlimit(both[1].process.pid or 0, resource.RLIMIT_FSIZE, (size, size))
    assert [process.end() for process in both] == [2, 2]
    assert checkpoint.checkpoints(tmp_path / "run")
    assert not list((tmp_path / "run").glob(".*"))
