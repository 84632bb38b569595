"""`longrnn diagnose states` on a tiny checkpoint."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import yaml

from longrnn import load
from longrnn.files import sha256
from longrnn.mitigations.base import Calibration
from longrnn.mitigations.spec import write_calibration
from tests.cli.conftest import CLI, refused

SHORT = ["--length", "600", "--train-length", "64", "--quiet"]
PICTURES = ["channels", "overview", "statistics"]


@pytest.fixture
def text(tmp_path: Path) -> list[str]:
    (tmp_path / "a.txt").write_text("It was a dark and stormy night. " * 20)
    return ["--text", "a.txt"]


def prompts(folder: Path) -> list[str]:
    content = yaml.safe_load((folder / "diagnosis.yaml").read_text())
    return [prompt["name"] for prompt in content["prompts"]]


def test_diagnose_states(cli: CLI, models: Path, text: list[str], tmp_path: Path) -> None:
    """`diagnose states` prints its findings and writes all its files."""
    result = cli("diagnose", "states", models / "text", *text, *SHORT)
    assert result.code == 0, result.err
    assert result.err == ""
    folder = tmp_path / "results/states/text"
    files = {"diagnosis.yaml", "report.html", "states.jsonl"}
    files |= {f"{name}.png" for name in PICTURES}
    assert {path.name for path in folder.iterdir()} == files
    written = result.out.splitlines()[-len(files) :]
    assert {Path(line).name for line in written} == files
    assert all((tmp_path / line).is_file() for line in written)
    content = yaml.safe_load((folder / "diagnosis.yaml").read_text())
    assert content["checkpoint"] == str(models / "text")
    assert content["fingerprint"] == load(models / "text").fingerprint()
    assert content["prompts"][0] == {
        "name": "a.txt", "sha256": sha256(tmp_path / "a.txt"), "tokens": 600,
    }  # fmt: skip
    rows = [json.loads(line) for line in (folder / "states.jsonl").read_text().splitlines()]
    assert {row["prompt"] for row in rows} == {"a.txt", "newlines"}
    assert "<img" in (folder / "report.html").read_text()


@pytest.mark.parametrize(
    ("options", "names"),
    [
        (["--newlines"], ["newlines"]),
        (["--text", "a.txt", "--newlines"], ["a.txt", "newlines"]),
        (["--text", "a.txt", "--no-newlines"], ["a.txt"]),
    ],
)
def test_which_prompts(
    options: list[str], names: list[str], cli: CLI, models: Path, text: list[str], tmp_path: Path
) -> None:
    """Newlines are measured beside a text by default, alone with --newlines, else not."""
    result = cli("diagnose", "states", models / "text", *options, *SHORT, "--output", "out")
    assert result.code == 0, result.err
    assert prompts(tmp_path / "out") == names


def test_the_training_length_of_a_run(
    cli: CLI, models: Path, text: list[str], tmp_path: Path
) -> None:
    """The training length is read from train.yaml."""
    shutil.copytree(models / "text", tmp_path / "run")
    (tmp_path / "run/train.yaml").write_text("length: {max: 48}\n")
    command = ["diagnose", "states", "run", *text, "--length", "300", "--quiet"]
    assert cli(*command, "--every", "50", "--first", "10").code == 0
    content = yaml.safe_load((tmp_path / "results/states/run/diagnosis.yaml").read_text())
    assert (content["train_length"], content["every"], content["first"]) == (48, 50, 10)


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
    assert max(row["norm"] for row in rows) < 0.0101
    content = yaml.safe_load((folder / "diagnosis.yaml").read_text())
    assert content["fingerprint"] != fingerprint
    assert "state_norm" in content["mitigation"]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--text", "none.txt"], ("none.txt",)),
        (["--text", "empty.txt"], ("empty.txt",)),
        (["--length", "1k"], ("1,024",)),
        (["--length", "64"], ("64", "--length")),
        (["--length", "x"], ("'x'",)),
        (["--train-length", "0"], ("length",)),
        (["--every", "0"], ("length",)),
        (["--first", "600"], ()),
        (["--mitigation", "slidingwindow"], ("mitigation",)),
        (["--device", "abacus"], ()),
    ],
)
def test_bad_input(
    options: list[str],
    says: tuple[str, ...],
    cli: CLI,
    models: Path,
    text: list[str],
    tmp_path: Path,
) -> None:
    """Bad input is refused in one sentence, and nothing is written."""
    (tmp_path / "empty.txt").write_text("")
    refused(cli, "diagnose", "states", models / "text", *text, *SHORT, *options, says=says)


def test_what_is_missing(cli: CLI, models: Path, text: list[str]) -> None:
    """A missing training length or a missing prompt is refused with the option to give."""
    command = ["diagnose", "states", models / "text", "--length", "600", "--quiet"]
    refused(cli, *command, says=("--newlines",))
    refused(cli, *command, "--no-newlines", says=("--text",))
    refused(cli, *command, *text, says=("length", "--train-length"))
    refused(cli, "diagnose", "states", "passkey-tyni", *text, says=("passkey-tiny",))
