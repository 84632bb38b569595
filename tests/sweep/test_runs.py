"""Sweeps: what is run, what is kept, what fails, and how runs are compared."""

from __future__ import annotations

import fcntl
import math
import os
import signal
import subprocess
import threading
import time
from pathlib import Path
from typing import Any, cast

import pytest
from scipy import stats

from longrnn.errors import UserError
from longrnn.evaluation import sequences
from longrnn.hf.load import load
from longrnn.intervals import Estimate
from longrnn.results import Row, read_results
from longrnn.sweep import runs as module
from longrnn.sweep.grid import Axes, GridRun, expand, parse_axes
from longrnn.sweep.runs import Sweep, _environment, _measured
from longrnn.sweep.table import differences, markdown, means, parse_baseline, verdict
from longrnn.training import checkpoint
from tests.holders import held
from tests.training.forks import run
from tests.training.runs import (
    ENVIRONMENT,
    last_checkpoint,
    metrics,
    signal_after,
    start,
    tiny,
    train,
    write_config,
)

AXES = parse_axes(["position.kind=none,duplicate", "seed=1"])
TINY = {"max_steps": 3, "length": {"max": 4}}


def points(folder: Path, axes: Axes = AXES) -> list[GridRun]:
    return expand(tiny("reverse", folder, **TINY), axes, folder / "runs")


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the runs for which a process was started, which sees the threads of a test.

    Runs of the duplicate encoding fail at once, so that a test trains one run and not many.
    """
    monkeypatch.setattr(os, "environ", {**ENVIRONMENT})
    started: list[str] = []
    begin = subprocess.Popen

    def popen(command: list[str], **options: Any) -> subprocess.Popen[bytes]:
        if "train" not in command:  # another process of the test
            return cast("subprocess.Popen[bytes]", begin(command, **options))
        config = command[command.index("train") + 1]
        started.append(Path(config).stem)
        if "duplicate" in config:
            command = ["sh", "-c", "echo a warning >&2; echo 'error: broken' >&2; exit 2"]
        return cast("subprocess.Popen[bytes]", begin(command, **options))

    monkeypatch.setattr(module.subprocess, "Popen", popen)
    return started


def test_a_sweep_from_end_to_end(
    tmp_path: Path, trained: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """Every run is trained and scored once; a failed run does not stop the others."""
    todo = points(tmp_path)
    log = tmp_path / f"logs/{todo[0].name}.log"
    log.parent.mkdir()
    with open(log, "ab") as orphan:  # as the trainer of a killed sweep holds it
        fcntl.flock(orphan, fcntl.LOCK_EX)
        seen: list[str] = []
        release = threading.Timer(0.7, lambda: (seen.extend(trained), orphan.close()))
        release.start()
        rows, failures = Sweep(todo, tmp_path, jobs=2, quiet=True).run()
    assert todo[0].name not in seen, "trained by two processes"
    assert capsys.readouterr().err.count(f"waiting for {todo[0].name}: ") == 1
    assert failures == [(todo[1].name, "broken", tmp_path / f"logs/{todo[1].name}.log")]
    assert failures[0].log.is_file()
    assert [row["run"] for row in rows] == [todo[0].name]
    assert sorted(trained) == sorted(point.name for point in todo)
    # The scores are those of the run's own model on the held-out sequences.
    header, scores = read_results(tmp_path / f"scores/{todo[0].name}.jsonl")
    assert header["model"] == load(todo[0].config.output_dir).fingerprint()
    assert len(scores) == 16
    expected = sequences.summarise(scores)["token_accuracy"].mean
    assert rows[0]["metrics"]["token_accuracy"] == expected
    assert rows[0]["metrics"]["training_loss"] > 0
    # What failed is run again, and nothing else.
    trained.clear()
    again, failures = Sweep(todo, tmp_path, quiet=True).run()
    assert (trained, len(failures)) == ([todo[1].name], 1)
    assert again == rows
    # A run that another grid names otherwise is known by its configuration.
    trained.clear()
    other = points(tmp_path, parse_axes(["position.kind=none", "max_steps=3", "seed=1"]))
    [row], _ = Sweep(other, tmp_path, quiet=True).run()
    assert trained == []
    assert row["values"] == {"position.kind": "none", "max_steps": "3", "seed": "1"}
    assert row["metrics"] == again[0]["metrics"]


def test_a_run_that_goes_on_is_asked_anew(tmp_path: Path) -> None:
    """A run that is continued to more steps is scored again."""
    seen = []
    for steps in (2, 3):
        base = tiny(
            "reverse", tmp_path, lr_scheduler_type="constant", max_steps=steps, warmup_steps=1
        )
        [point] = expand(base, parse_axes(["seed=1"]), tmp_path / "runs")
        train(point.config, resume=True)
        row = _measured(point, "cpu", tmp_path)
        header, scores = read_results(tmp_path / "scores/seed=1.jsonl")
        assert header["model"] == load(point.config.output_dir).fingerprint()
        assert len(scores) == 16
        assert row["config"]["max_steps"] == steps
        seen.append(header["model"])
    assert seen[0] != seen[1]


def test_a_folder_has_one_sweep_at_a_time(tmp_path: Path, trained: list[str]) -> None:
    """A second sweep is refused while the first one is at work, and nothing is trained."""
    todo = points(tmp_path, parse_axes(["seed=1"]))
    with held(tmp_path):
        trained.clear()  # the process that holds the lock
        with pytest.raises(UserError):
            Sweep(todo, tmp_path, quiet=True).run()
    assert trained == []
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_sweep_that_is_stopped_goes_on(tmp_path: Path, number: signal.Signals) -> None:
    """A stopped sweep leaves no trainer, and its runs continue from their last step."""
    config = tiny("reverse", tmp_path / "run", max_steps=1000, save_steps=50, logging_steps=50)
    path = write_config(config, tmp_path / "c.yaml")
    command = ["sweep", str(path), "--grid", "seed=1", "--output", str(tmp_path / "out")]
    process = start(*command)
    folder = tmp_path / "out/runs/seed=1"
    signal_after(process, folder / "metrics.jsonl", number, lines=2)
    out, err = process.communicate(timeout=120)
    if number == signal.SIGKILL:
        assert process.returncode == -signal.SIGKILL
        ended(tmp_path / "out/logs/seed=1.log")
    else:
        assert process.returncode == (0 if number == signal.SIGTERM else 2), err
        assert "longrnn sweep" in out + err
    done = checkpoint.steps(last_checkpoint(folder))
    assert 50 <= done < 1000
    finished = run(*command)
    assert finished.returncode == 0, finished.stderr
    steps = [row["step"] for row in metrics(folder)]
    assert steps == list(range(50, 1001, 50))
    log = (tmp_path / "out/logs/seed=1.log").read_text()
    assert log.count("1000 steps") == 1


def ended(log: Path) -> None:
    """Waits until no trainer holds its log: it stops by itself."""
    deadline = time.monotonic() + 60
    with open(log, "ab") as file:
        while time.monotonic() < deadline:
            try:
                return fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                time.sleep(0.1)
    raise AssertionError("the trainer of a killed sweep goes on")


def test_devices_and_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs take the devices in turn and share the cores."""
    monkeypatch.setattr(os, "environ", {})
    monkeypatch.setattr(module, "module_environment", lambda _: dict(os.environ))
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    assert _environment("cpu", 2) == {"OMP_NUM_THREADS": "4", "CUDA_VISIBLE_DEVICES": ""}
    assert _environment("cuda:1", 16) == {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "1"}
    assert "CUDA_VISIBLE_DEVICES" not in _environment("cuda", 1)
    monkeypatch.setattr(os, "environ", {"CUDA_VISIBLE_DEVICES": "4,7", "OMP_NUM_THREADS": "3"})
    assert _environment("cuda:1", 2) == {"OMP_NUM_THREADS": "3", "CUDA_VISIBLE_DEVICES": "7"}
    with pytest.raises(UserError, match="jobs"):
        Sweep([], Path("x"), jobs=0)


def row(kind: str, seed: int, accuracy: float, size: str = "8") -> Row:
    values = {"position.kind": kind, "vocab_size": size, "seed": str(seed)}
    return {"values": values, "metrics": {"token_accuracy": accuracy}}


TABLE = {"position.kind": ["none", "duplicate"], "vocab_size": ["8", "16"], "seed": ["1", "2", "3"]}
ROWS = [
    *(row("none", seed, 0.5 + 0.1 * seed + 0.01 * (seed == 2)) for seed in (1, 2, 3)),
    *(row("duplicate", seed, 0.4 + 0.1 * seed) for seed in (3, 2, 1)),
    *(row("none", seed, 0.1 * seed, "16") for seed in (1, 2)),
    *(row("duplicate", seed, 0.1 * seed, "16") for seed in (2, 3)),
]


def test_differences_are_paired_by_seed() -> None:
    """Differences are taken between runs of the same seed."""
    first, second = differences(ROWS, TABLE, ("position.kind", "duplicate"), "token_accuracy")
    assert first.values == {"position.kind": "none", "vocab_size": "8"}
    assert first.against == {"position.kind": "duplicate", "vocab_size": "8"}
    less = [0.1, 0.11, 0.1]
    assert first.estimate.mean == pytest.approx(sum(less) / 3)
    half = stats.t.ppf(0.975, 2) * stats.sem(less)
    assert first.estimate.high - first.estimate.mean == pytest.approx(half)
    assert first.verdict == "higher"
    assert second.estimate.n == 1  # seed 2 alone is in both
    assert second.verdict == "inconclusive"
    found = means(ROWS, TABLE)
    assert [values["vocab_size"] for values, _ in found] == ["8", "8", "16", "16"]
    assert found[0][1]["token_accuracy"].mean == pytest.approx(0.7 + 0.01 / 3)


def test_verdicts_follow_from_intervals() -> None:
    """There is a verdict only where the interval excludes 0."""
    assert verdict(Estimate(0.1, 0.01, 0.2, 3)) == "higher"
    assert verdict(Estimate(-0.1, -0.2, -0.01, 3)) == "lower"
    for low, high in ((-0.1, 0.3), (0.0, 0.2), (-0.2, 0.0), (-math.inf, math.inf)):
        assert (
            verdict(Estimate((low + high) / 2 if low > -1 else 1, low, high, 3)) == "inconclusive"
        )
    assert verdict(Estimate(0.1, 0.1, 0.1, 2)) == "inconclusive"


def test_the_table() -> None:
    """The table has every group; one run has no interval."""
    lines = markdown(ROWS, TABLE, ("position.kind", "duplicate"))
    assert lines[0] == "| position.kind | vocab_size | runs | token_accuracy |"
    assert lines[2] == "| none | 8 | 3 | 0.703 [0.455, 0.952] |"
    assert lines[-1] == "| 16 | none | 1 | 0.000 | inconclusive |"
    assert lines[-2].endswith("| higher |")
    assert len(lines) == 2 + 4 + 1 + 2 + 2
    assert markdown([], TABLE, None) == ["No run is done."]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("position.kind", "position.kind"),
        ("position.knd=none", "position.kind"),
        ("seed=1", "grid"),
        ("position.kind=duplicat", "duplicate"),
    ],
)
def test_a_baseline_must_be_in_the_grid(text: str, says: str) -> None:
    """A baseline that is not in the grid is refused."""
    with pytest.raises(UserError) as refusal:
        parse_baseline(text, TABLE)
    assert says in str(refusal.value)
