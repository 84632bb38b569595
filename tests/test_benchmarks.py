"""Every benchmark runs at a small size."""

from __future__ import annotations

import json
import sys
from importlib import import_module
from pathlib import Path

import pytest
import torch

from benchmarks.models import DECODED, Llama

SMALL = ["--layers", "1", "--d-model", "64", "--vocab", "64", "--repeats", "1"]
CASES = [
    ("speed", ["prefill", "--tokens", "64"], "products alone"),
    ("speed", ["decode", "--steps", "2"], "reading the weights"),
    ("speed", ["train", "--tokens", "64"], "longrnn, carried state"),
    ("speed", ["mitigations", "--tokens", "64", "--window", "8"], "sliding_window, 8"),
    ("speed", ["delta", "--tokens", "64", "--steps", "2"], "Gated DeltaNet layer, decoding"),
    ("memory", ["train", "--tokens", "64"], "gradient_checkpointing=block"),
    ("lm_eval", ["--context", "64", "--choice", "4"], "3.53 times fewer"),
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


@pytest.mark.slow
def test_memory_of_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Peaks are measured in processes of their own."""
    options = ["prefill", "stream", "--tokens", "64", "--long", "128", *SMALL]
    monkeypatch.setattr(sys, "argv", ["memory.py", *options])
    import_module("benchmarks.memory").main()


def test_llama_cpp_is_timed_by_its_own_program(tmp_path: Path) -> None:
    """A model that is missing is left out; times are per call of the other programs."""
    program = tmp_path / "llama-bench"
    program.write_text(f'#!/bin/sh\necho "$@" > {tmp_path}/args\necho \'[{{"avg_ns": 2e9}}]\'\n')
    program.chmod(0o755)
    (tmp_path / "float32.gguf").touch()
    llama = Llama(str(program), tmp_path)
    assert llama.timers("decode", "bfloat16", 4) == {}
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        assert llama.timers("decode", "float32", 4)["llama.cpp"]() == 2 * 4 / DECODED
        assert f"-n {DECODED} -p 0 -t 2 -r 1" in (tmp_path / "args").read_text()
    finally:
        torch.set_num_threads(before)
