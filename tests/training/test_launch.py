"""`longrnn launch`: two processes, whose launcher ends as the run does."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from longrnn.cli.app import app
from longrnn.results import read_rows
from longrnn.training import checkpoint
from tests.training.runs import ENVIRONMENT, TEXTS, signal_after, tiny, write_config

TEXT = {"kind": "text", "files": TEXTS}
TWO = ("--cpu", "--num_processes", "2")


def start(*arguments: str | Path, options: Sequence[str] = TWO) -> subprocess.Popen[str]:
    """`longrnn launch OPTIONS ARGUMENTS` on a machine without GPUs."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    command = [sys.executable, "-m", "longrnn.cli", "launch"]
    command += ["--main_process_port", port, *options]
    pipe = subprocess.PIPE
    environment = {name: value for name, value in ENVIRONMENT.items() if name != "WORLD_SIZE"}
    environment["CUDA_VISIBLE_DEVICES"] = ""
    return subprocess.Popen(
        [*command, *map(str, arguments)], stdout=pipe, stderr=pipe, text=True, env=environment,
        start_new_session=True,
    )  # fmt: skip


def launch(
    *arguments: str | Path, options: Sequence[str] = TWO
) -> subprocess.CompletedProcess[str]:
    """`start`, to its end."""
    process = start(*arguments, options=options)
    out, err = process.communicate(timeout=200)
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


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
    options = TWO if processes == 2 else ("--config_file", "cpu1")
    process = start("train", path, "--quiet", options=options)
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


@pytest.mark.parametrize(
    ("options", "override", "message"),
    [
        ((*TWO, "--mixed_precision", "bf16"), "seed=1", "mixed_precision bf16 and the run has no"),
        (("--config_file", "gpu8"), "seed=1", "8 processes with a GPU each on this machine"),
        (TWO, "per_device_train_batch_size=64", "and there are 256 streams"),
    ],
)
def test_an_error_is_printed_once(
    options: Sequence[str], override: str, message: str, tmp_path: Path
) -> None:
    """One line for all processes, exit code 2, and nothing is written."""
    path = write_config(tiny("streams", tmp_path / "run", task=TEXT), tmp_path / "config.yaml")
    done = launch("train", path, override, options=options)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: ")
    assert message in line
    assert not (tmp_path / "run").exists()


def test_an_evaluation_in_two_processes(tmp_path: Path) -> None:
    """The rows of both processes are in one file."""
    how = ["--lengths", "256", "--n", "2", "--depths", "2", "--quiet", "--output"]
    done = launch("eval", "passkey", "passkey-tiny", *how, tmp_path / "out")
    assert done.returncode == 0, done.stderr
    assert sum(len(read_rows(path)[0]) for path in (tmp_path / "out").glob("rows*")) == 4


def test_the_help_lists_the_arguments() -> None:
    """With the commands that can be launched."""
    shown = CliRunner().invoke(app, ["launch", "--help"]).output
    for word in ("--num_processes", "--machine_rank", "finetune", "compare"):
        assert word in shown


def test_a_launch_without_a_command_is_refused() -> None:
    """The options need a command behind them."""
    done = launch("trian", "config.yaml")
    assert done.returncode == 2
    assert "and then train, finetune, eval or compare: write `longrnn launch" in done.stderr
