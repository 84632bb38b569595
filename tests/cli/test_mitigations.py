"""Calibration, and every command that takes a mitigation, on an embedded checkpoint."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from longrnn import load, mitigation
from longrnn.data.prompts import FILLER
from longrnn.results import read_rows
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


def fingerprint(spec: str) -> str:
    return load(CHECKPOINT).under(mitigation(spec)).fingerprint()


def test_eval_passkey(cli: CLI, calibrated: str, tmp_path: Path) -> None:
    """A mitigation changes the answers, and its rows carry its own fingerprint."""
    strong = "forget_more(decay_scale=0.5, input_scale=1.0)"
    variants = [CHECKPOINT, f"{CHECKPOINT}+{calibrated}", f"{CHECKPOINT}+{strong}"]
    both = f"{CHECKPOINT}+{calibrated}+{strong}"
    result = cli("eval", "passkey", *variants, both, *SMALL, "--output", "out")
    assert (result.code, result.err) == (0, "")
    found = json.loads((tmp_path / "out/cells.json").read_text())
    assert {name: about["fingerprint"] for name, about in found["models"].items()} == {
        CHECKPOINT: load(CHECKPOINT).fingerprint(),
        variants[1]: fingerprint(calibrated),
        variants[2]: fingerprint(strong),
        both: fingerprint(f"{calibrated}+{strong}"),
    }
    right = {cell["model"]: cell["estimate"]["mean"] for cell in found["cells"]}
    assert (right[CHECKPOINT], right[variants[2]], right[both]) == (1, 0, 0)
    # What stands behind the checkpoint, and what --mitigation says, apply both, in this order.
    again = cli("eval", "passkey", variants[1], *SMALL, "--output", "two", "--mitigation", strong)
    assert again.code == 0
    models = {row["model"] for row in read_rows(tmp_path / "two/rows.jsonl")[0]}
    assert models == {fingerprint(f"{calibrated}+{strong}")}


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
