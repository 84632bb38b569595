"""What a tracker receives, where it writes, and how a resume changes it."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from longrnn.errors import UserError
from longrnn.training import processes
from longrnn.training.trainer import Trainer
from tests.training.runs import assert_same_run, crash, metrics, tiny, train


def tracked(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """(step, value) of every scalar that TensorBoard would show."""
    pytest.importorskip("tensorboard", reason="tensorboard is not installed")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder))
    events.Reload()
    return {
        tag: [(event.step, event.value) for event in events.Scalars(tag)]
        for tag in events.Tags()["scalars"]
    }


def test_tensorboard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """TensorBoard gets each row once, also after a resume, and does not change the run."""
    plain = tiny("passkey", tmp_path / "plain")
    train(plain)
    watched = tiny("passkey", tmp_path / "watched", report_to="tensorboard")
    crash(watched, 7, monkeypatch)
    assert (tmp_path / "watched/metrics.jsonl").is_file()
    train(watched, resume=True)
    assert_same_run(tmp_path / "plain", tmp_path / "watched")
    rows = metrics(tmp_path / "watched")
    found = tracked(tmp_path / "watched/tensorboard")
    assert found.keys() == {*rows[0], "tokens_per_second"} - {"step"}
    for name in rows[0].keys() - {"step"}:
        expected = [(row["step"], pytest.approx(row[name], rel=1e-6)) for row in rows]
        assert found[name] == expected, name
    # Without the tracker the run can go on too.
    train(tiny("passkey", tmp_path / "watched"), resume=True)


def test_no_tracker_by_default(tmp_path: Path) -> None:
    """By default no tracker writes anything."""
    train(tiny("reverse", tmp_path, max_steps=1))
    assert not (tmp_path / "tensorboard").exists()


def test_what_cannot_track_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tracker whose package is missing is refused before training."""
    with pytest.raises(UserError, match="tensorboard"):
        tiny("reverse", tmp_path / "run", report_to="tensorbord")
    real: Callable[..., Any] = importlib.util.find_spec
    missing = lambda name: None if name == "tensorboard" else real(name)  # noqa: E731
    monkeypatch.setattr(processes, "find_spec", missing)
    with pytest.raises(UserError, match="pip install tensorboard"):
        Trainer(tiny("reverse", tmp_path / "run", report_to="tensorboard"), quiet=True)
    assert not (tmp_path / "run").exists()


def test_wandb_offline_writes_into_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """wandb in offline mode gets the rows, under one identity also after a resume."""
    wandb = pytest.importorskip("wandb", reason="wandb is not installed")
    monkeypatch.setenv("WANDB_MODE", "offline")
    logged: list[tuple[int, float]] = []
    whole = wandb.Run.log

    def log(self: Any, data: dict[str, float], step: int | None = None, **options: Any) -> None:
        logged.append((step or 0, data["loss"]))
        whole(self, data, step=step, **options)

    monkeypatch.setattr(wandb.Run, "log", log)
    config = tiny("passkey", tmp_path / "run", report_to="wandb")
    crash(config, 7, monkeypatch)
    wandb.finish()
    identity = (tmp_path / "run/tracker-id").read_text()
    train(config, resume=True)
    assert (tmp_path / "run/tracker-id").read_text() == identity
    rows = [(row["step"], row["loss"]) for row in metrics(tmp_path / "run")]
    assert logged == [*rows[:2], *rows[1:]]
    kept = list((tmp_path / "run/wandb").glob(f"offline-run-*-{identity}/*.wandb"))
    assert len(kept) == 2
    assert capsys.readouterr().out == ""


def test_trackio_writes_into_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """trackio gets the rows, in the folder that TRACKIO_DIR names, without a network."""
    pytest.importorskip("trackio", reason="trackio is not installed")
    import subprocess
    import sys

    from tests.training.runs import ENVIRONMENT, write_config

    path = write_config(tiny("passkey", tmp_path / "run", report_to="trackio"), tmp_path / "c.yaml")
    environment = {**ENVIRONMENT, "TRACKIO_DIR": str(tmp_path / "trackio"), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "longrnn.cli", "train", str(path), "--quiet"],
        capture_output=True,
        text=True,
        env=environment,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    # trackio itself prints another line when Python exits.
    assert done.stdout.startswith(str(tmp_path / "run"))
    import sqlite3

    (database,) = (tmp_path / "trackio").glob("longrnn*.db")
    (count,) = sqlite3.connect(database).execute("select count(*) from metrics").fetchone()
    assert count == len(metrics(tmp_path / "run"))
