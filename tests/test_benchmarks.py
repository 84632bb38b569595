"""The grids of the measurements meet their bars in tokens, which are counted and not timed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.evaluation_cpu.passkey import BARS, grids
from longrnn.evaluation.passkey import Subject, cost
from longrnn.text import ByteTokenizer
from tests.contracts.builders import build_model
from tests.training.runs import ENVIRONMENT

ROOT = Path(__file__).parent.parent


def ratio(name: str, scale: int) -> float:
    model = build_model("rnn", vocab_size=256)
    found = cost([Subject("model", model, ByteTokenizer())], grids(scale)[name])
    return found["model"].ratio


@pytest.mark.parametrize("name", list(BARS))
def test_tokens(name: str) -> None:
    """A grid that has changed, or prompts that no longer meet where they are the same."""
    tokens, _ = BARS[name]
    assert ratio(name, 1) >= tokens


def benchmark(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "benchmarks.evaluation_cpu", *arguments],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=ENVIRONMENT,
        check=False,
    )


def test_an_unknown_part() -> None:
    """A typing error that runs everything."""
    done = benchmark("paskey")
    assert done.returncode == 2
    assert "parts: passkey, perplexity, harness" in done.stdout


@pytest.mark.slow
def test_the_parts_run(tmp_path: Path) -> None:
    """A program that is found broken on the day of the measurement."""
    out = str(tmp_path / "f.json")
    small = ["--scale", "128", "--keys", "1", "--threads", "1", "--json", out]
    done = benchmark("passkey", *small)
    assert done.returncode == 0, done.stderr
    assert "insertion points: " in done.stdout
    assert "python -m benchmarks.evaluation_cpu.passkey" in Path(out).read_text()
    done = benchmark("perplexity", "--scale", "64", "--threads", "1")
    assert done.returncode == 0, done.stderr
    assert "peak memory" in done.stdout
