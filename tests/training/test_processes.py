"""Two processes train like one, or the launch is refused.

Judged by what was written: gloo aborts about one run in ten at its very end.
"""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from longrnn import load
from longrnn.text import ByteTokenizer
from longrnn.training.config import TrainConfig
from longrnn.training.documents import build_corpus
from tests.training.runs import ENVIRONMENT, TEXTS, metrics, run, tiny, train, write_config

REPOSITORY = Path(__file__).parents[2]
SHORT: dict[str, Any] = {"max_steps": 5, "logging_steps": 1, "save_steps": 3}


def launch(
    config: TrainConfig, folder: Path, *flags: str, use_cpu: bool = True
) -> subprocess.CompletedProcess[str]:
    """Trains under `accelerate launch`, on a port of its own."""
    path = write_config(config, folder / "config.yaml")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    command = [sys.executable, "-m", "accelerate.commands.launch", *flags]
    command += ["--main_process_port", port] if "--cpu" not in flags else []
    command += ["-m", "longrnn.cli", "train", str(path), "--quiet"]
    environment = dict(ENVIRONMENT)
    if not use_cpu:
        del environment["ACCELERATE_USE_CPU"]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=300, env=environment, cwd=REPOSITORY
    )


CPU2 = ("--config_file", "configs/accelerate/cpu2.yaml")


@pytest.mark.parametrize("kind", ["passkey", "carry", "lanes", "fitted_noise"])
def test_two_processes_train_like_one(kind: str, tmp_path: Path) -> None:
    """Gradients that are not averaged, rows seen twice, lanes mixed up, metrics of one process."""
    how = dict(SHORT)
    if kind == "lanes":  # states carried over 20 steps of two segments, from a corpus
        build_corpus(
            [Path(file) for file in TEXTS],
            ByteTokenizer(),
            tmp_path / "c",
            name="bytes",
            quiet=True,
        )
        task = {"kind": "text", "corpus": str(tmp_path / "c"), "max_segments": 7}
        how |= {"max_steps": 20, "task": task, "initial_state": {"kind": "carry"}}
    steps = how["max_steps"]
    one = tiny(kind, tmp_path / "one", per_device_train_batch_size=4, **how)
    two = tiny(kind, tmp_path / "two", per_device_train_batch_size=2, num_processes=2, **how)
    train(one)
    done = launch(two, tmp_path, *CPU2)
    assert (tmp_path / "two/model.safetensors").is_file(), done.stderr
    expected, rows = metrics(tmp_path / "one"), metrics(tmp_path / "two")
    assert [row["step"] for row in rows] == list(range(1, steps + 1))
    for row, wanted in zip(rows, expected, strict=True):
        assert row.keys() == wanted.keys()
        for name, value in row.items():
            assert value == pytest.approx(wanted[name], rel=1e-4, abs=1e-5), name
        assert row["loss"] == pytest.approx(wanted["loss"], abs=1e-5)
    checkpoint = tmp_path / f"two/checkpoint-{steps:08d}"
    carried = sorted(path.name for path in checkpoint.glob("carry-*.pt"))
    assert carried == ["carry-0.pt", "carry-1.pt"]
    assert load(checkpoint).fingerprint() == load(tmp_path / "two").fingerprint()


@pytest.mark.slow
def test_multi_gpu_without_the_cpu_flag_is_synchronised_or_refused(tmp_path: Path) -> None:
    """The launch that starts two processes which do not know each other."""
    two = tiny("passkey", tmp_path / "two", num_processes=2, **SHORT)
    flags = ("--multi_gpu", "--num_processes", "2", "--num_machines", "1")
    flags += ("--mixed_precision", "no", "--dynamo_backend", "no")
    done = launch(two, tmp_path, *flags, use_cpu=False)
    if (tmp_path / "two/model.safetensors").is_file():
        train(tiny("passkey", tmp_path / "one", per_device_train_batch_size=4, **SHORT))
        losses = [[row["loss"] for row in metrics(tmp_path / n)] for n in ("one", "two")]
        assert losses[0] == pytest.approx(losses[1], abs=1e-5)
    else:
        assert "error: " in done.stderr
        assert not (tmp_path / "two/metrics.jsonl").exists()


def test_one_process_where_two_were_asked_for_is_refused(tmp_path: Path) -> None:
    """`accelerate launch --cpu --num_processes 2` starts one process and says nothing."""
    two = tiny("passkey", tmp_path / "two", num_processes=2, **SHORT)
    done = launch(two, tmp_path, "--cpu", "--num_processes", "2", "--num_machines", "1")
    assert done.returncode != 0
    assert "error: 2 processes were asked for and this one sees 1: launch with" in done.stderr
    assert not (tmp_path / "two").exists()


def test_a_process_alone_with_a_world_size_is_refused(tmp_path: Path) -> None:
    """A process that waits for others that nobody started, or trains without them."""
    config = tiny("passkey", tmp_path / "run", **SHORT)
    path = write_config(config, tmp_path / "config.yaml")
    done = run("train", path, "--quiet", WORLD_SIZE="2")
    assert done.returncode == 2
    assert done.stderr.startswith("error: 2 processes were asked for")
    assert len(done.stderr.splitlines()) == 1
    assert not (tmp_path / "run").exists()
