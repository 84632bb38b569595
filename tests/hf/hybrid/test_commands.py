"""A hybrid under a mitigation and with a window of attention, from the command line."""

from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from longrnn.cli.app import app
from tests.hf.foreign import architecture, with_bytes


def run(*arguments: Any) -> str:
    result = CliRunner().invoke(app, [*map(str, arguments)], catch_exceptions=False, color=False)
    assert result.exit_code == 0, result.output
    return result.output


KINDS = {
    "falcon_h1": "mamba2",
    "falcon_mamba": "mamba",
    "jamba": "mamba",
    "mamba": "mamba",
    "kimi_linear": "kda",
    "minimax": "LightningAttention",
    "qwen3_next": "gated_deltanet",
    "recurrent_gemma": "RGLRU",
    "xlstm": "MLSTM",
    "zamba": "mamba",
}
# With attention, with a layer that none of our cells computes alone, and of such layers only.
DEFAULT = ("falcon_h1", "minimax", "xlstm")


@pytest.mark.parametrize(
    "kind",
    [kind if kind in DEFAULT else pytest.param(kind, marks=pytest.mark.slow) for kind in KINDS],
)
def test_commands(kind: str, tmp_path: Path) -> None:
    """Info, calibration, diagnosis, perplexity, passkey and generation run on a hybrid."""
    theirs = architecture(kind, vocab_size=256, max_position_embeddings=2048)
    folder, text = with_bytes(theirs, tmp_path / "hybrid"), tmp_path / "book.txt"
    text.write_text("The grass is green. The sky is blue. The sun is yellow. Here we go. " * 12)
    assert f" × {KINDS[kind]}" in run("info", folder)
    calibrated, common = tmp_path / "norm.yaml", ["--text", text]
    run("calibrate", folder, *common, "--train-length", 64, "--method", "state_norm",
        "--output", calibrated)  # fmt: skip
    out = tmp_path / "states"
    run("diagnose", "states", folder, *common, "--train-length", 64, "--length", 256,
        "--output", out)  # fmt: skip
    assert "collapsing" in (out / "diagnosis.yaml").read_text()
    run("diagnose", "gradients", folder, *common, "--length", 4, "--output", tmp_path / "gradients")
    run("eval", "perplexity", folder, *common, "--lengths", 128, "--mitigation", calibrated,
        "--output", tmp_path / "ppl")  # fmt: skip
    run("eval", "passkey", f"{folder}+forget_more", "--lengths", 256, "--n", 1,
        "--depths", 1, "--output", tmp_path / "passkey")  # fmt: skip
    run("generate", f"{folder}+forget_more", "--prompt", "The grass", "--max-new-tokens", 3)
