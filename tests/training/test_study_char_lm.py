"""The character study runs from end to end, goes on where it stopped, and judges by its numbers."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from scripts.report_char_lm import SETTINGS, verdict
from scripts.study_char_lm import TOLERANCE, matched, parameters
from tests.training.runs import ENVIRONMENT

REPOSITORY = Path(__file__).parents[2]
OTHERS = {setting.name: [1.0, 1.1, 1.2] for setting in SETTINGS}


def test_models_of_one_size() -> None:
    """The compared models have about the same number of parameters."""
    sizes = [parameters(matched(kind, 96)) for kind in ("rnn", "gru", "lstm", "mamba2")]
    assert max(sizes) <= (1 + TOLERANCE) ** 2 * min(sizes)
    assert sizes[0] == 2 * 256 * 96 + 2 * 96 * 96 + 2 * 96


@pytest.mark.parametrize(
    ("shorter", "says"),
    [
        ([2.001, 2.101, 2.201], "**Confirmed**"),
        ([1.9, 2.0, 2.1], "**Confirmed**"),  # longer windows hurt: they do not help either
        ([2.1, 2.201, 2.3], "**Refuted**"),
        ([2.0, 2.2, 2.3], "**Inconclusive**"),
    ],
)
def test_verdicts(shorter: list[float], says: str) -> None:
    """The verdict follows from the interval of paired differences."""
    losses = {**OTHERS, "rnn-16": shorter, "rnn-64": [2.0, 2.1, 2.2], "gru-64": [2.1, 2.2, 2.3]}
    first, gru, lstm, _ = verdict(losses)
    assert says in first
    assert gru.endswith("worse.")
    assert "1.0000 [1.0000, 1.0000] nats less, better" in lstm
    single = verdict({name: values[:1] for name, values in losses.items()})
    assert "Not judged" in single[0]


@pytest.mark.slow
def test_a_tiny_study(tmp_path: Path) -> None:
    """The study runs from end to end at a small size and can be resumed."""
    (tmp_path / "t.txt").write_text("".join(f"{n} squared is {n * n}.\n" for n in range(6000)))
    command = [sys.executable, "-m", "scripts.study_char_lm", str(tmp_path / "t.txt"), "--quiet"]
    command += ["--steps", "2", "--width", "64", "--output", str(tmp_path / "out")]
    command += ["--report", str(tmp_path / "r.md")]

    def study(seeds: int) -> str:
        done = subprocess.run(
            [*command, "--seeds", str(seeds)],
            capture_output=True,
            text=True,
            timeout=600,
            cwd=REPOSITORY,
            env=ENVIRONMENT,
        )
        assert done.returncode == 0, done.stderr
        assert (tmp_path / "r.md").read_text() == done.stdout
        return done.stdout

    first = study(1)
    for setting in SETTINGS:
        assert f"| {setting.kind} | {setting.window} |" in first
        assert f"\n{setting.name}:\n" in first
    assert "Not judged" in first
    models = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("checkpoint-*")}
    second = study(2)
    assert "2 seed(s)" in second
    assert "Not judged" not in second
    assert all(path.stat().st_mtime_ns == time for path, time in models.items())
    (tmp_path / "t.txt").write_text("another text\n" * 9000)
    done = subprocess.run(command, capture_output=True, text=True, cwd=REPOSITORY, env=ENVIRONMENT)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: ")
    assert "holds the study of another text" in done.stderr
