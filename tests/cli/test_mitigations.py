"""Calibration, and every command that takes a mitigation, on an embedded checkpoint."""

from pathlib import Path

import pytest

from longrnn.data.prompts import FILLER
from tests.cli.conftest import CLI, refused

CHECKPOINT = "passkey-tiny-short"  # two layers of four heads, trained on 256 tokens
SMALL = ["--lengths", "160", "--depths", "1", "--n", "2"]
PASSKEY = ["eval", "passkey", CHECKPOINT, *SMALL]
PROSE = "Call me Ishmael. Some years ago, never mind how long precisely, I went to sea. " * 8


@pytest.fixture
def texts(tmp_path: Path) -> None:
    """`filler.txt` to calibrate on, `prose.txt` to evaluate on."""
    (tmp_path / "filler.txt").write_text(FILLER * 12)
    (tmp_path / "prose.txt").write_text(PROSE)


@pytest.fixture
def calibrated(cli: CLI, texts: None, tmp_path: Path) -> str:
    """`norm.yaml`: a state norm for CHECKPOINT, low enough to change its results."""
    options = ["--method", "state_norm(margin=0.3)", "--output", "norm.yaml"]
    result = cli("calibrate", CHECKPOINT, "--text", "filler.txt", *options)
    assert (result.code, result.err) == (0, "")
    return "norm.yaml"


def test_a_filler_that_was_calibrated_on(
    cli: CLI, calibrated: str, caplog: pytest.LogCaptureFixture
) -> None:
    """`eval passkey` warns if the mitigation was calibrated on the filler."""
    result = cli(*PASSKEY, "--mitigation", calibrated, "--filler", "filler.txt")
    assert result.code == 0
    assert "filler.txt" in caplog.text
    caplog.clear()
    command = [*PASSKEY, "--output", "prose", "--filler", "prose.txt"]
    assert cli(*command, "--mitigation", calibrated).code == 0
    assert cli(*PASSKEY, "--filler", "filler.txt").code == 0
    assert caplog.text == ""


def test_diagnose_states(cli: CLI, calibrated: str, tmp_path: Path) -> None:
    """A mitigation accepts the diagnosis of the plain model alone, and only if a head collapses."""
    command = ["diagnose", "states", CHECKPOINT, "--text", "prose.txt", "--length", "400"]
    ours = cli(*command, "--mitigation", calibrated, "--output", "ours")
    assert (ours.code, ours.err) == (0, "")
    # The heads that a diagnosis names can be given to a mitigation; here, short of collapse, none.
    assert cli(*command, "--output", "plain").code == 0
    spec = "forget_more(heads=collapsing, diagnosis={}/diagnosis.yaml)"
    says = ("lists no collapsing head", "leave the mitigation out")
    refused(cli, *PASSKEY, "--mitigation", spec.format("plain"), says=says)
    diagnosis = tmp_path / "plain/diagnosis.yaml"
    diagnosis.write_text(diagnosis.read_text().replace("collapsing: []", "collapsing: [[0, 1]]"))
    assert cli(*PASSKEY, "--mitigation", spec.format("plain")).code == 0
    says = ("the diagnosis of another model",)
    refused(cli, *PASSKEY, "--mitigation", spec.format("ours"), says=says)
