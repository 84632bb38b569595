"""A hybrid under a mitigation and with a window of attention, from the command line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from longrnn.cli.app import app
from tests.hf.architectures import architecture
from tests.hf.foreign import with_bytes

# A threshold small enough to change the states of random weights.


def run(*arguments: Any) -> str:
    result = CliRunner().invoke(app, [*map(str, arguments)], catch_exceptions=False, color=False)
    assert result.exit_code == 0, result.output
    return result.output


@pytest.mark.parametrize(
    ("kind", "mixer"), [("falcon_h1", "mamba2"), ("qwen3_next", "gated_deltanet")]
)
def test_commands(kind: str, mixer: str, tmp_path: Path) -> None:
    """Info, calibration, diagnosis, perplexity and passkey run on a hybrid."""
    theirs = architecture(kind, vocab_size=256, max_position_embeddings=2048)
    folder, text = with_bytes(theirs, tmp_path / "hybrid"), tmp_path / "book.txt"
    text.write_text("The grass is green. The sky is blue. The sun is yellow. Here we go. " * 12)
    assert f" × {mixer}" in run("info", folder)
    calibrated, common = tmp_path / "norm.yaml", ["--text", text]
    run("calibrate", folder, *common, "--train-length", 64, "--method", "state_norm",
        "--output", calibrated)  # fmt: skip
    out = tmp_path / "states"
    run("diagnose", "states", folder, *common, "--train-length", 64, "--length", 256,
        "--output", out)  # fmt: skip
    assert "collapsing" in (out / "diagnosis.yaml").read_text()
    run("eval", "perplexity", folder, *common, "--lengths", 128, "--mitigation", calibrated,
        "--output", tmp_path / "ppl")  # fmt: skip
    run("eval", "passkey", f"{folder}+forget_more", "--lengths", 256, "--n", 1,
        "--depths", 1, "--output", tmp_path / "passkey")  # fmt: skip
