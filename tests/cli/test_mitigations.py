"""An evaluation on the text of the calibration, on an embedded checkpoint."""

from pathlib import Path

import pytest

from longrnn.data.prompts import FILLER
from tests.cli.conftest import CLI

CHECKPOINT = "passkey-tiny-short"  # two layers of four heads, trained on 256 tokens
SMALL = ["--lengths", "160", "--depths", "1", "--n", "2"]
PASSKEY = ["eval", "passkey", CHECKPOINT, *SMALL]
PROSE = "Call me Ishmael. Some years ago, never mind how long precisely, I went to sea. " * 8


def test_a_filler_that_was_calibrated_on(
    cli: CLI, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """`eval passkey` warns if the mitigation was calibrated on the filler."""
    (tmp_path / "filler.txt").write_text(FILLER * 12)
    (tmp_path / "prose.txt").write_text(PROSE)
    options = ["--method", "state_norm(margin=0.3)", "--output", "norm.yaml"]
    assert cli("calibrate", CHECKPOINT, "--text", "filler.txt", *options).code == 0
    result = cli(*PASSKEY, "--mitigation", "norm.yaml", "--filler", "filler.txt")
    assert result.code == 0
    assert "filler.txt" in caplog.text
    caplog.clear()
    command = [*PASSKEY, "--output", "prose", "--filler", "prose.txt"]
    assert cli(*command, "--mitigation", "norm.yaml").code == 0
    assert cli(*PASSKEY, "--filler", "filler.txt").code == 0
    assert caplog.text == ""
