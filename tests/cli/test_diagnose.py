"""`longrnn diagnose states` on a tiny checkpoint."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from longrnn import load
from longrnn.files import sha256
from longrnn.mitigations.base import Calibration
from longrnn.mitigations.spec import write_calibration
from tests.cli.conftest import CLI

SHORT = ["--length", "600", "--train-length", "64", "--quiet"]


@pytest.fixture
def text(tmp_path: Path) -> list[str]:
    (tmp_path / "a.txt").write_text("It was a dark and stormy night. " * 20)
    return ["--text", "a.txt"]


def test_a_mitigation(
    cli: CLI, models: Path, text: list[str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """States under a mitigation have their own results folder and fingerprint."""
    fingerprint = load(models / "text").fingerprint()
    known = Calibration("c.yaml", fingerprint, 64, (sha256(tmp_path / "a.txt"),))
    member = {"kind": "state_norm", "threshold": 0.01}
    write_calibration(tmp_path / "c.yaml", [member], known)
    result = cli("diagnose", "states", models / "text", *text, *SHORT, "--mitigation", "c.yaml")
    assert result.code == 0, result.err
    assert "a.txt" in caplog.text
    folder = tmp_path / "results/states/text-c.yaml"
    rows = [json.loads(line) for line in (folder / "states.jsonl").read_text().splitlines()]
    assert max(norm for row in rows for (heads,) in row["norm"] for norm in heads) < 0.0101
    content = yaml.safe_load((folder / "diagnosis.yaml").read_text())
    assert content["fingerprint"] != fingerprint
    assert "state_norm" in content["mitigation"]
