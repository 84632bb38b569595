"""The study of initial states runs from end to end and can be resumed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from longrnn.config import load_config
from longrnn.training.config import TrainConfig
from longrnn.training.initial_states import INITIAL_STATES
from tests.training.runs import ENVIRONMENT

REPOSITORY = Path(__file__).parents[2]


@pytest.mark.slow
def test_a_tiny_study(tmp_path: Path) -> None:
    """The study runs from end to end at a small size and can be resumed."""
    (tmp_path / "train.txt").write_text(
        "".join(f"{n} squared is {n * n}.\n" for n in range(20_000))
    )
    (tmp_path / "other.txt").write_text("".join(f"{n} cubed is {n**3}.\n" for n in range(800)))
    command = [sys.executable, REPOSITORY / "scripts/study_initial_states.py", "--quiet"]
    command += ["--train", "train.txt", "--text", "other.txt", "--output", "out"]
    command += ["--base-steps", "2", "--steps", "2", "--train-length", "32", "--length", "256"]
    command += ["--row-lengths", "64", "--step-tokens", "1k", "--max-segments", "8"]

    def study(seeds: int) -> list[str]:
        done = subprocess.run(
            [*command, "--seeds", str(seeds)],
            capture_output=True,
            text=True,
            timeout=300,
            cwd=tmp_path,
            env=ENVIRONMENT,
        )
        assert done.returncode == 0, done.stderr
        assert (tmp_path / "out/table.md").read_text() == done.stdout
        return done.stdout.splitlines()

    lines = study(1)
    assert "| windows of 32 | 0 to 32 | 32 to 64 | 64 to 128 | 128 to 256 |" in lines[0]
    kinds = ["base", *INITIAL_STATES, "zero-64"]
    others = [f"{kind} − zero" for kind in kinds[1:] if kind != "zero"]
    assert [line.split("|")[1].strip() for line in lines[2:]] == kinds + others
    rows = load_config(TrainConfig, tmp_path / "out/zero-64/seed0/train.yaml")
    assert (rows.length.max, rows.per_device_train_batch_size) == (64, 16)
    models = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("checkpoint-*")}
    assert len(study(2)) == len(lines)
    assert all(path.stat().st_mtime_ns == time for path, time in models.items())
