"""`longrnn train` killed and interrupted in a process of its own."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.training.runs import (
    assert_same_run,
    last_checkpoint,
    metrics,
    run,
    signal_after,
    start,
    tiny,
    train,
    write_config,
)

# Many steps and checkpoints, so that a signal falls anywhere within them.
LONG = {"max_steps": 200, "save_steps": 20, "logging_steps": 5, "length": {"max": 6}}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same run, left alone."""
    output = tmp_path_factory.mktemp("undisturbed") / "run"
    train(tiny("reverse", output, **LONG))
    return output


def test_killed_and_resumed(tmp_path: Path, undisturbed: Path) -> None:
    """What only a real kill shows: half-written files, rows that were not yet on disk."""
    output = tmp_path / "run"
    path = write_config(tiny("reverse", output, **LONG), tmp_path / "config.yaml")
    process = start("train", path, "--quiet")
    signal_after(process, output / "checkpoint-00000040", signal.SIGKILL)
    process.communicate()
    assert process.returncode == -signal.SIGKILL
    assert not (output / "model.safetensors").exists()
    finished = run("train", path, "--resume", "--quiet")
    assert finished.returncode == 0, finished.stderr
    assert finished.stdout == f"{output}: trained for 200 steps\n"
    assert_same_run(undisturbed, output)
    assert not list(output.glob(".*"))


def test_interrupted_and_resumed(tmp_path: Path, undisturbed: Path) -> None:
    """Ctrl-C that loses the steps since the last checkpoint, or breaks a step in two."""
    output = tmp_path / "run"
    path = write_config(tiny("reverse", output, **LONG), tmp_path / "config.yaml")
    process = start("train", path, "save_steps=1000", "--quiet")
    signal_after(process, output / "metrics.jsonl", signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 2
    assert not out
    again = f"longrnn train {path} save_steps=1000 --quiet --resume"
    assert err == f"error: interrupted; what was finished is kept, go on with: {again}\n"
    step = int(last_checkpoint(output).name.removeprefix("checkpoint-"))
    assert step >= metrics(output)[-1]["step"] > 0
    assert step < 200
    finished = run(*again.split()[1:])
    assert finished.returncode == 0, finished.stderr
    assert_same_run(undisturbed, output)
