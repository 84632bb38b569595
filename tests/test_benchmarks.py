"""Every benchmark runs at a small size."""

from __future__ import annotations

import json
import sys
from importlib import import_module
from pathlib import Path

import pytest
import torch

SMALL = ["--layers", "1", "--d-model", "64", "--vocab", "64", "--repeats", "1"]
CASES = [
    ("speed", ["prefill", "--tokens", "64"], "products alone"),
    ("speed", ["decode", "--steps", "2"], "reading the weights"),
    ("speed", ["decode", "--steps", "2", "--rows", "8", "--cell", "mamba"], "decoding of 8 rows"),
    ("speed", ["train", "--tokens", "64"], "longrnn, carried state"),
    ("speed", ["hybrid", "--tokens", "8"], "a tiny kimi_linear, 4 rows of 8 tokens"),
    ("speed", ["mitigations", "--tokens", "64", "--window", "8"], "sliding_window, 8"),
    ("speed", ["layer", "--tokens", "64", "--steps", "2"], "Kimi Delta Attention layer, decoding"),
    ("gpu", ["models", "--device", "cpu", "--lengths", "64"], "transformers, 64 tokens"),
    ("gpu", ["train", "--device", "cpu", "--lengths", "64"], "longrnn, mamba_ssm"),
    ("memory", ["cells", "--long", "4096"], "kda, time per token and peak memory: 4,096:"),
    ("memory", ["train", "--tokens", "64"], "gradient_checkpointing=block"),
]


@pytest.mark.parametrize(("name", "options", "expected"), CASES)
def test_a_benchmark_runs(
    name: str,
    options: list[str],
    expected: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Its case is printed, and the record has the command and the machine."""
    threads = ["--threads", str(torch.get_num_threads())]
    record = tmp_path / "record.json"
    arguments = [*options, *SMALL, *threads, "--json", str(record)]
    monkeypatch.setattr(sys, "argv", [f"{name}.py", *arguments])
    import_module(f"benchmarks.{name}").main()
    assert expected in capsys.readouterr().out
    assert json.loads(record.read_text())["command"].startswith(f"python -m benchmarks.{name} ")
