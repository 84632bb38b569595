"""Every benchmark runs at a small size."""

import json
import sys
from importlib import import_module
from pathlib import Path

import pytest
import torch

from tests.cli.conftest import table
from tests.texts import DATA

SMALL = ["--layers", "1", "--d-model", "64", "--vocab", "64", "--repeats", "1"]
CASES = table((DATA / "benchmarks.txt").read_text(), {})


@pytest.mark.parametrize(("command", "expected"), CASES)
def test_a_benchmark_runs(
    command: str,
    expected: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Its case is printed, and the record has the command and the machine."""
    monkeypatch.setattr("benchmarks.memory.MIXERS", ["kda"])  # each has a process of its own
    name, *options = command.split()
    threads = ["--threads", str(torch.get_num_threads())]
    record = tmp_path / "record.json"
    arguments = [*options, *SMALL, *threads, "--json", str(record)]
    monkeypatch.setattr(sys, "argv", [f"{name}.py", *arguments])
    import_module(f"benchmarks.{name}").main()
    assert expected[0] in capsys.readouterr().out
    assert json.loads(record.read_text())["command"].startswith(f"python -m benchmarks.{name} ")
