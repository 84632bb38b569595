"""Every command that evaluates a model runs on every hybrid from the command line.

Plain, under a mitigation of some layers, with a window of attention, and with both.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from longrnn.cli.app import app
from longrnn.hf.hybrid.families import FAMILIES
from tests.hf.architectures import architecture
from tests.hf.foreign import with_bytes

SENTENCES = "The grass is green. The sky is blue. The sun is yellow. Here we go. "
# Small enough to change the states of random weights.
NORM = "state_norm(threshold=0.01, layers=[0])"
WINDOW = "attention_window(window=32)"
VARIANTS = {"plain": "", "norm": f"+{NORM}", "window": f"+{WINDOW}", "both": f"+{WINDOW}+{NORM}"}
PASSKEYS = json.dumps({"max_seq_lengths": [256], "n": 1})
KINDS = [pytest.param(kind, marks=pytest.mark.slow) for kind in sorted(FAMILIES)]


def run(*arguments: Any) -> str:
    result = CliRunner().invoke(
        app, [*map(str, arguments), "--quiet"], catch_exceptions=False, color=False
    )
    assert result.exit_code == 0, result.output
    return result.output


@pytest.fixture
def checkpoint(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    theirs = architecture(request.param, vocab_size=256, max_position_embeddings=1024)
    return with_bytes(theirs, tmp_path / "hybrid")


@pytest.fixture
def book(tmp_path: Path) -> Path:
    path = tmp_path / "book.txt"
    path.write_text(SENTENCES * 20)
    return path


@pytest.mark.parametrize("checkpoint", ["falcon_h1"], indirect=True)
def test_compare_and_lm_eval_tasks_on_a_hybrid(checkpoint: Path, tmp_path: Path) -> None:
    """The short form of the tests beside this one."""
    suite = tmp_path / "short.yaml"
    harness = {"kind": "harness", "tasks": ["longrnn_passkey"], "metadata": json.loads(PASSKEYS)}
    suite.write_text(yaml.safe_dump({"evaluations": [harness]}))
    output, both = tmp_path / "compare", f"{checkpoint}{VARIANTS['both']}"
    run("compare", checkpoint, both, "--suite", suite, "--output", output)
    lines = (output / "comparison.jsonl").read_text().splitlines()
    assert {json.loads(line)["reason"] for line in lines} == {None}
    told = run("eval", "harness", both, "--tasks", "longrnn_passkey", "--metadata", PASSKEYS)
    assert "longrnn_passkey" in told


@pytest.mark.parametrize("checkpoint", KINDS, indirect=True)
def test_evaluations_calibration_and_diagnosis(
    checkpoint: Path, book: Path, tmp_path: Path
) -> None:
    """And a window lifts the limit of 1,024 tokens."""
    losses = set()
    for name, variant in VARIANTS.items():
        model, out = f"{checkpoint}{variant}", tmp_path / name
        run("eval", "passkey", model, "--lengths", 256, "--n", 1, "--depths", 1, "--output", out)
        run("eval", "perplexity", model, "--text", book, "--length", 128, "--by-position",
            "--output", out / "loss")  # fmt: skip
        (rows,) = [path.read_text() for path in (out / "loss").glob("*.jsonl")]
        losses.add(rows.splitlines()[1])
        run("diagnose", "states", model, "--text", book, "--no-newlines", "--train-length", 64,
            "--length", 128, "--every", 32, "--first", 16, "--output", out / "states")  # fmt: skip
        found = yaml.safe_load((out / "states/diagnosis.yaml").read_text())
        assert (found["mitigation"] is None) == (name in ("plain", "window"))
        told = run("eval", "harness", model, "--tasks", "longrnn_passkey", "--metadata", PASSKEYS)
        assert "longrnn_passkey" in told
    assert len(losses) == len(VARIANTS)
    window = f"{checkpoint}+{WINDOW}"
    calibrated = tmp_path / "norm.yaml"
    run("calibrate", window, "--text", book, "--train-length", 64, "--method", "state_norm",
        "--output", calibrated)  # fmt: skip
    run("eval", "passkey", f"{window}+{calibrated}", "--lengths", 2048, "--n", 1, "--depths", 1,
        "--output", tmp_path / "long")  # fmt: skip
