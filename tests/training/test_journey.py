"""A published checkpoint is fine-tuned, killed and resumed, on one process and on two."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from longrnn import load
from longrnn.training import checkpoint
from tests.training.forks import Fork, pair
from tests.training.journeys import documents, published_mamba2
from tests.training.runs import ENVIRONMENT, assert_same_run, last_checkpoint, metrics

# Small enough for a test, with everything that a run has.
SMALL = ["max_steps=6", "eval_steps=2", "save_steps=2", "logging_steps=1", "warmup_steps=1"]
SMALL += ["learning_rate=0.01", "eval_length=96", "eval_samples=2", "segments_per_step=2"]
PEFT = "peft={r: 2, alpha: 4, full: [A_log, dt_bias, conv1d], merge: true}"
FSDP = {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}


@pytest.fixture(scope="module")
def shelf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A published checkpoint `base` and documents `docs`."""
    root = tmp_path_factory.mktemp("journey")
    published_mamba2(root / "base")
    documents(root / "docs")
    return root


def tuned(shelf: Path, folder: Path, *arguments: str | Path) -> Fork:
    """A command that must end well."""
    process = Fork(*arguments, folder=folder, LONGRNN_CACHE=str(shelf / "cache"))
    assert process.end() == 0, process.err
    return process


def command(shelf: Path, output: Path, *overrides: str) -> list[str]:
    named = ["--data", str(shelf / "docs"), "--length", "32", "--output", str(output)]
    return ["finetune", str(shelf / "base"), *named, "--no-evaluate", "--quiet", *SMALL, *overrides]


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.arange(90)[None]).logits.float()


@pytest.mark.slow
@pytest.mark.parametrize("environment", [{}, FSDP], ids=["copies", "shards"])
@pytest.mark.parametrize("adapters", [False, True], ids=["weights", "adapters"])
def test_two_processes_train_like_one(
    adapters: bool, environment: dict[str, str], shelf: Path, tmp_path: Path
) -> None:
    """Packed streams with a carried state: losses to 1e-6, and the same model in the end."""
    cache = {"LONGRNN_CACHE": str(shelf / "cache")}
    peft = [PEFT] if adapters else []
    rows = "per_device_train_batch_size"
    one = Fork(
        *command(shelf, tmp_path / "one", f"{rows}=4", *peft),
        folder=tmp_path / "log",
        before=None,
        **cache,
    )
    assert one.end() == 0, one.err
    two = command(shelf, tmp_path / "two", f"{rows}=2", "num_processes=2", *peft)
    both = pair(*two, folder=tmp_path / "pair", **environment, **cache)
    assert [process.end() for process in both] == [0, 0], both[0].err + both[1].err
    expected, found = metrics(tmp_path / "one"), metrics(tmp_path / "two")
    assert len(found) == len(expected) == 9
    for row, wanted in zip(found, expected, strict=True):
        assert row.keys() == wanted.keys()
        for name in row:
            if "loss" in name:
                assert row[name] == pytest.approx(wanted[name], rel=1e-6), (row["step"], name)
    assert last_checkpoint(tmp_path / "one").name == last_checkpoint(tmp_path / "two").name
    for part in ["", "merged"] if adapters else [""]:
        ours, theirs = (logits(load(tmp_path / name / part)) for name in ("one", "two"))
        torch.testing.assert_close(theirs, ours, rtol=1e-3, atol=1e-4)


@pytest.mark.slow
def test_killed_in_the_middle_and_resumed(shelf: Path, tmp_path: Path) -> None:
    """After SIGKILL, the same command with --resume ends bit for bit like an undisturbed run."""
    rows = "per_device_train_batch_size=2"
    tuned(shelf, tmp_path / "log", *command(shelf, tmp_path / "straight", rows))
    arguments = command(shelf, tmp_path / "run", rows)
    killed = Fork(*arguments, folder=tmp_path / "log", LONGRNN_CACHE=str(shelf / "cache"))
    assert killed.when(lambda: (tmp_path / "run/checkpoint-00000002").is_dir()), killed.err
    killed.send(signal.SIGKILL)
    assert killed.end() == -signal.SIGKILL
    assert checkpoint.steps(last_checkpoint(tmp_path / "run")) < 6
    tuned(shelf, tmp_path / "log", *arguments, "--resume")
    assert_same_run(tmp_path / "straight", tmp_path / "run")


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["carry", "pass", "fitted_noise", "instruct", "passkey"])
def test_recipes(recipe: str, shelf: Path, tmp_path: Path) -> None:
    """Every recipe of docs/finetune.md lowers its loss, at reduced size."""
    rows, output = "per_device_train_batch_size=2", tmp_path / "run"
    if recipe == "passkey":
        path = Path(__file__).parents[2] / "configs/train/finetune_passkey.yaml"
        texts = sorted(str(text) for text in (shelf / "docs").iterdir())
        arguments = ["train", str(path), f"init_from={shelf / 'base'}", f"output_dir={output}"]
        arguments += [f"task.filler={json.dumps(texts)}", "length={max: 140, min: 100}", rows]
        arguments += [*SMALL[3:6], "--quiet"]
    else:
        arguments = command(shelf, output, rows)
        kind = "zero" if recipe == "instruct" else recipe
        arguments += ["--initial-state", kind]
        if recipe != "carry":
            arguments.remove("segments_per_step=2")
        if recipe == "instruct":
            pairs = [{"prompt": f"{k} + {k} =", "completion": f" {2 * k}"} for k in range(200)]
            lines = "".join(json.dumps(pair) + "\n" for pair in pairs)
            (tmp_path / "pairs.jsonl").write_text(lines)
            arguments[arguments.index("--data") + 1] = str(tmp_path / "pairs.jsonl")
            arguments += ["task.kind=instruct", "task.append_eos=false"]
            arguments.remove("eval_length=96")
    tuned(shelf, tmp_path / "log", *arguments, "max_steps=12")
    measured = "loss" if recipe == "passkey" else "eval_loss"
    losses = [row[measured] for row in metrics(output) if measured in row]
    assert losses[-1] < losses[0]


@pytest.mark.slow
def test_two_machines_find_each_other(shelf: Path, tmp_path: Path) -> None:
    """The launch file of two machines, with one CPU process on each, trains one model."""
    path = Path(__file__).parents[2] / "configs/accelerate/gpu16_two_nodes.yaml"
    content = yaml.safe_load(path.read_text())
    content |= {"use_cpu": True, "num_processes": 2, "mixed_precision": "no"}
    launch = tmp_path / "launch.yaml"
    launch.write_text(yaml.safe_dump(content))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    run = command(shelf, tmp_path / "run", "per_device_train_batch_size=2", "num_processes=2")
    machines = []
    for rank in ("0", "1"):
        options = ["--config_file", str(launch), "--machine_rank", rank]
        options += ["--main_process_ip", "127.0.0.1", "--main_process_port", port]
        start = [sys.executable, "-m", "longrnn.cli", "launch", *options, *run]
        environment = {**ENVIRONMENT, "LONGRNN_CACHE": str(shelf / "cache")}
        machines.append(subprocess.Popen(start, env=environment, start_new_session=True))
    assert [machine.wait(300) for machine in machines] == [0, 0]
    assert checkpoint.processes(last_checkpoint(tmp_path / "run")) == 2
    assert len([row for row in metrics(tmp_path / "run") if "loss" in row]) == 6
