"""Commands on a simulated GPU write the numbers that they write on a CPU."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from longrnn import processes
from longrnn.cli.options import pick_device
from longrnn.errors import UserError
from tests.cli.conftest import CLI
from tests.simulated_cuda import simulated
from tests.training.conftest import fresh_accelerate as fresh_accelerate

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a real GPU")

TEXT = "It was a dark and stormy night; the rain fell in torrents. " * 12
NORM = "passkey-tiny-short+state_norm(threshold=2)"
WINDOW = "passkey-tiny-short+sliding_window(window=100)"
PASSKEY = ["--lengths", "160", "--n", "1", "--depths", "2", "--quiet"]
LENGTH = ["--text", "a.txt", "--length", "192", "--quiet"]
COMMANDS = {
    "passkey": ["eval", "passkey", "passkey-tiny", NORM, WINDOW, *PASSKEY],
    "one prompt at a time": ["eval", "passkey", "passkey-tiny", *PASSKEY, "--naive"],
    "chunks": ["eval", "passkey", "passkey-tiny", *PASSKEY, "--chunk-select", "64"],
    "perplexity": ["eval", "perplexity", "collapse-tiny", WINDOW, *LENGTH, "--by-position"],
    "overlapping": [
        "eval", "perplexity", "collapse-tiny", *LENGTH, "--context", "128", "--stride", "64",
    ],
    "states": ["diagnose", "states", NORM, *LENGTH, "--train-length", "64"],
    "memory": [
        "diagnose", "memory", "passkey-tiny", "--text", "a.txt", "--positions", "32",
        "--stretches", "1", "--quiet",
    ],
}  # fmt: skip
METHODS = {
    "state_norm": [],
    "token_filter": ["--target-length", "1k"],
    "scale_delta": ["--target-length", "512", "--steps", "2"],
}


@pytest.mark.parametrize("device", ["auto", "cuda"])
def test_every_process_of_a_launch_gets_its_own_gpu(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By its number on its machine; one without a GPU is refused, and a launch on CPUs has none."""
    with simulated():
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
        assert pick_device(device) == "cuda"
        monkeypatch.setattr(processes, "_group", processes._Group(1, 3))
        for rank in ("0", "1"):
            monkeypatch.setenv("LOCAL_RANK", rank)
            assert pick_device(device) == f"cuda:{rank}"
        monkeypatch.setenv("LOCAL_RANK", "2")
        with pytest.raises(UserError, match="needs a GPU of its own, and torch can use 2"):
            pick_device(device)
        monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
        assert pick_device("auto") == "cpu"


@pytest.fixture(autouse=True)
def text(cli: CLI, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text(TEXT)


def numbers(value: Any) -> Iterator[float]:
    """All numbers in a line of results."""
    if isinstance(value, dict):
        for name, one in value.items():
            if name != "sha256":
                yield from numbers(one)
    elif isinstance(value, list):
        for one in value:
            yield from numbers(one)
    elif isinstance(value, (int, float)):
        yield float(value)


def written(folder: Path) -> dict[str, list[float]]:
    return {
        path.relative_to(folder).as_posix(): list(
            numbers([json.loads(line) for line in path.read_text().splitlines()])
        )
        for path in folder.rglob("*.jsonl")
    }


@pytest.mark.parametrize("name", COMMANDS)
def test_evaluations_and_diagnoses(name: str, cli: CLI, tmp_path: Path) -> None:
    """All results, of plain and mitigated models."""
    command = COMMANDS[name]
    on_cpu = cli(*command, "--device", "cpu", "--output", "cpu")
    assert on_cpu.code == 0, on_cpu.err
    with simulated(fused=False):
        on_gpu = cli(*command, "--device", "cuda", "--output", "gpu")
    assert on_gpu.code == 0, on_gpu.err
    found, wanted = written(tmp_path / "gpu"), written(tmp_path / "cpu")
    assert found.keys() == wanted.keys()
    for path, exact in wanted.items():
        assert exact
        assert found[path] == pytest.approx(exact, rel=1e-3, abs=1e-5), path


@pytest.mark.parametrize("method", METHODS)
def test_calibration(method: str, cli: CLI, tmp_path: Path) -> None:
    """Writes the same file."""
    checkpoint, device = "passkey-tiny-short", ["--quiet", "--device"]
    command = ["calibrate", checkpoint, "--text", "a.txt", "--windows", "1", "--method", method]
    on_cpu = cli(*command, *METHODS[method], *device, "cpu", "--output", "cpu.yaml")
    with simulated(fused=False):
        on_gpu = cli(*command, *METHODS[method], *device, "cuda", "--output", "gpu.yaml")
    assert (on_cpu.code, on_gpu.code) == (0, 0), on_gpu.err
    assert on_gpu.out.replace("gpu.yaml", "cpu.yaml") == on_cpu.out


@pytest.mark.parametrize("options", [[], ["--weights", "int8"], ["--mitigation", "forget_more"]])
def test_generation(options: list[str], cli: CLI) -> None:
    """Greedy tokens are equal; a graph decodes them, and a sampled text runs."""
    command = ["generate", "passkey-tiny", "--prompt", "The pass key is 12345.", *options]
    wanted = cli(*command, "--max-new-tokens", "30", "--device", "cpu")
    with simulated(fused=False):
        found = cli(*command, "--max-new-tokens", "30", "--device", "cuda")
        sampled = cli(*command, "--max-new-tokens", "20", "--temperature", "0.7")
    assert found.code == sampled.code == 0, found.err + sampled.err
    assert found.out == wanted.out


@pytest.mark.parametrize(
    "precision", ["bf16", *(pytest.param(one, marks=pytest.mark.slow) for one in ("no", "fp16"))]
)
def test_training(precision: str, cli: CLI, fresh_accelerate: None, tmp_path: Path) -> None:
    """A run, another that resumes it, and a look at its gradients."""
    content = {
        "output_dir": "run",
        "task": {"kind": "passkey"},
        "model": {
            "vocab_size": 256,
            "d_model": 8,
            "n_layers": 1,
            "mixer": {"kind": "mamba2", "d_state": 4, "head_dim": 8},
        },
        "length": {"max": 180},
        "per_device_train_batch_size": 2,
        "warmup_steps": 0,
        "max_steps": 2,
        "save_steps": 1,
        "mixed_precision": precision,
    }
    (tmp_path / "run.yaml").write_text(json.dumps(content))
    with simulated(fused=False):
        first = cli("train", "run.yaml", "--quiet")
        more = cli("train", "run.yaml", "--resume", "--extend-to", "3", "max_steps=2", "--quiet")
        seen = cli("diagnose", "gradients", "run", "--lengths", "180", "--rows", "1", "--quiet")
    assert (first.code, more.code, seen.code) == (0, 0, 0), first.err + more.err + seen.err
    assert "3 steps" in more.out
