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
from tests.training.runs import assert_same_run, metrics, tiny, train
from tests.training.test_trainer import crash


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
    with pytest.raises(UserError, match="did you mean 'tensorboard'"):
        tiny("reverse", tmp_path / "run", report_to="tensorbord")
    real: Callable[..., Any] = importlib.util.find_spec
    missing = lambda name: None if name == "tensorboard" else real(name)  # noqa: E731
    monkeypatch.setattr(processes, "find_spec", missing)
    with pytest.raises(UserError, match="pip install tensorboard"):
        Trainer(tiny("reverse", tmp_path / "run", report_to="tensorboard"), quiet=True)
    assert not (tmp_path / "run").exists()
