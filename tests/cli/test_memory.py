"""`longrnn diagnose memory` and `longrnn diagnose capacity` on tiny checkpoints."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from longrnn.config import build_config
from longrnn.models import RecurrentConfig, RecurrentLM
from longrnn.models.checkpoint import save_model
from longrnn.results import read_results
from tests.cli.conftest import CLI, refused
from tests.holders import held
from tests.training.runs import LSTM

FAST = ["--positions", "32,64", "--quiet"]


@pytest.fixture
def text(tmp_path: Path) -> list[str]:
    (tmp_path / "a.txt").write_text("It was a dark and stormy night. " * 10)
    return ["--text", "a.txt"]


def test_diagnose_memory(cli: CLI, models: Path, text: list[str], tmp_path: Path) -> None:
    """`diagnose memory` prints its findings and writes all its files."""
    command = ["diagnose", "memory", models / "text", *text, *FAST]
    result = cli(*command)
    assert result.code == 0, result.err
    assert result.err == ""
    folder = tmp_path / "results/memory/text"
    names = ["effrem_by_start.png", "effrem_by_kept.png", "report.html"]
    assert {path.name for path in folder.iterdir()} == {*names, "results.jsonl"}
    written = result.out.splitlines()[-4:]
    assert [Path(line).name for line in written] == ["results.jsonl", *names]
    _, rows = read_results(folder / "results.jsonl")
    assert {row["position"] for row in rows} == {32, 64}
    html = (folder / "report.html").read_text()
    assert html.count('<img src="data:image/png;base64,') == 2
    assert "http" not in html
    before = (folder / "results.jsonl").read_bytes()
    assert cli(*command).out == result.out
    assert (folder / "results.jsonl").read_bytes() == before
    one = cli(*command, "--stretches", "1", "--mitigation", "forget_more")
    assert one.code == 0, one.err
    assert "inf" not in one.out
    assert (tmp_path / "results/memory/text--forget_more/report.html").is_file()


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--text", "none.txt"], ("none.txt",)),
        (["--positions", "1"], ("positions",)),
        (["--positions", "x"], ("'x'",)),
        (["--positions", "4k"], ()),
        (["--stretches", "0"], ()),
        (["--mitigation", "slidingwindow"], ("mitigation",)),
        (["--device", "abacus"], ()),
    ],
)
def test_bad_input(
    options: list[str], says: tuple[str, ...], cli: CLI, models: Path, text: list[str]
) -> None:
    """Bad input is refused in one sentence, and nothing is written."""
    refused(cli, "diagnose", "memory", models / "text", *text, *FAST, *options, says=says)


@pytest.fixture
def family(tmp_path: Path) -> list[str]:
    """Three models of three state sizes, with a recorded training length."""
    for width in (8, 16, 24):
        torch.manual_seed(width)
        config = {**LSTM, "d_model": width}
        folder = tmp_path / f"runs/{width}"
        save_model(RecurrentLM(build_config(RecurrentConfig, config)), folder)
        (folder / "train.yaml").write_text(f"length: {{max: {width * 8}}}\n")
    return [f"runs/{width}" for width in (8, 16, 24)]


def test_diagnose_capacity(cli: CLI, family: list[str], text: list[str], tmp_path: Path) -> None:
    """`diagnose capacity` finds recorded results, and fits only what has enough points."""
    for run in family:
        long = ["--length", "256", "--quiet"]
        assert cli("eval", "perplexity", run, *text, *long).code == 0
    asked = ["--lengths", "160", "--depths", "1", "--n", "2", "--quiet"]
    assert cli("eval", "passkey", *family, *asked).code == 0
    result = cli("diagnose", "capacity", *family)
    assert result.code == 0, result.err
    folder = tmp_path / "results/capacity"
    assert result.out.endswith("results/capacity/capacity.jsonl\nresults/capacity/capacity.png\n")
    lines = (folder / "capacity.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    members = [row for row in rows if row.get("row") == "model"]
    assert [row["train_length"] for row in members] == [64, 128, 192]
    assert [row["state_size"] for row in members] == [8, 16, 24]
    assert all(row["robust"] for row in members)
    assert [row["recalled"] for row in members] == [0, 0, 0]
    # Each was robust at the only length that was tried: bounds, and no fit through them.
    assert [row["forget"]["bound"] for row in rows if row.get("row") == "size"] == ["≤"] * 3
    assert "T_forget: no fit" in result.out
    assert "T_recall: no fit" in result.out
    assert (folder / "capacity.png").stat().st_size > 10_000
    with held(folder):
        refusal = cli("diagnose", "capacity", *family)
    assert refusal.code == 2
    assert "process" in refusal.err


def test_capacity_of_nothing(cli: CLI, models: Path, family: list[str], tmp_path: Path) -> None:
    """Models without recorded results or without a training length are refused."""
    command = ["diagnose", "capacity", *family]
    refused(cli, *command)
    (tmp_path / "results").mkdir()
    refused(cli, *command, says=("longrnn eval",))
    asked = ["--lengths", "160", "--depths", "1", "--n", "1", "--quiet"]
    assert cli("eval", "passkey", *family[:2], *asked).code == 0
    refused(cli, *command, says=("runs/24",))
    refused(cli, *command[:-1], says=("state",))
    refused(cli, "diagnose", "capacity", models / "text", says=("train.yaml",))
