"""`longrnn launch`: two processes, whose launcher ends as the run does."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from longrnn.training import checkpoint
from tests.training.runs import ENVIRONMENT, signal_after, tiny, write_config

CPU2 = Path(__file__).parents[2] / "configs/accelerate/cpu2.yaml"


def start(*arguments: str | Path, processes: int = 2) -> subprocess.Popen[str]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    options = ["--config_file", str(CPU2), "--main_process_port", port]
    if processes == 1:
        options = ["--config_file", str(CPU2.with_name("cpu1.yaml"))]
    command = [sys.executable, "-m", "longrnn.cli", "launch", *options, "train"]
    pipe = subprocess.PIPE
    environment = {name: value for name, value in ENVIRONMENT.items() if name != "WORLD_SIZE"}
    return subprocess.Popen(
        [*command, *map(str, arguments)], stdout=pipe, stderr=pipe, text=True, env=environment,
        start_new_session=True,
    )  # fmt: skip


def config(folder: Path, processes: int, **changes: Any) -> Path:
    two = tiny("carry", folder / "run", num_processes=processes, logging_steps=3, **changes)
    return write_config(two, folder / "config.yaml")


@pytest.mark.parametrize(
    ("processes", "whole_group"),
    [(2, False), pytest.param(2, True, marks=pytest.mark.slow), (1, False)],
)
def test_sigterm_saves_and_ends_the_launcher(
    processes: int, whole_group: bool, tmp_path: Path
) -> None:
    """After SIGTERM all processes save, and the launcher exits with 0 and without a traceback."""
    path = config(tmp_path, processes, max_steps=4000, save_steps=4000)
    process = start(path, "--quiet", processes=processes)
    if whole_group:  # as batch systems do
        while not (tmp_path / "run/metrics.jsonl").exists():
            assert process.poll() is None
            time.sleep(0.05)
        os.killpg(process.pid, signal.SIGTERM)
    else:
        signal_after(process, tmp_path / "run/metrics.jsonl", signal.SIGTERM)
    out, err = process.communicate(timeout=100)
    assert process.returncode == 0, err
    assert "Traceback" not in err
    (folder,) = checkpoint.checkpoints(tmp_path / "run")
    assert checkpoint.processes(folder) == processes
    assert f"step {checkpoint.steps(folder)} " in out
    assert "longrnn launch" in out
    assert out.rstrip().endswith(f"train {path} --quiet --resume")


def test_an_error_of_the_run_is_that_of_the_launcher(tmp_path: Path) -> None:
    """A bad configuration exits with 2 and one message per process."""
    process = start(config(tmp_path, 2), "max_step=3")
    _, err = process.communicate(timeout=100)
    assert process.returncode == 2
    assert "max_steps" in err
    assert "Traceback" not in err


def test_a_launch_without_a_command_is_refused(tmp_path: Path) -> None:
    """The options of accelerate need the command train behind them."""
    command = [sys.executable, "-m", "longrnn.cli", "launch", "--config_file", str(CPU2)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
