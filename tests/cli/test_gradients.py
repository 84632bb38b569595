"""`longrnn diagnose gradients` on tiny models."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from longrnn import load
from longrnn.config import build_config
from longrnn.models import RecurrentConfig, RecurrentLM
from tests.cli.conftest import CLI, refused
from tests.training.runs import tiny, write_config

SMALL = ["--lengths", "4,8", "--rows", "2", "--exponents", "1", "--quiet"]
FILES = {"gradients.jsonl", "report.html"}
FILES |= {f"{name}.png" for name in ("norms", "weights", "jacobian", "lyapunov")}


def head_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "gradients.jsonl").read_text().splitlines()[0])


def test_a_run(cli: CLI, models: Path, tmp_path: Path) -> None:
    """The task of a run is read from its folder, and all files are written."""
    result = cli("diagnose", "gradients", models / "backwards", *SMALL)
    assert result.code == 0, result.err
    assert result.err == ""
    folder = tmp_path / "results/gradients/backwards"
    assert {path.name for path in folder.iterdir()} == FILES
    assert {Path(line).name for line in result.out.splitlines()[-len(FILES) :]} == FILES
    assert str(models / "backwards") in "".join(result.out.split())
    head = head_of(folder)
    assert "'kind': 'reverse', 'vocab_size': 8" in head["task"]
    fingerprint = load(models / "backwards").fingerprint()
    assert head["subjects"] == {str(models / "backwards"): fingerprint}


def test_a_checkpoint_inside_a_run(cli: CLI, models: Path, tmp_path: Path) -> None:
    """The task of a checkpoint is read from the run that it is in."""
    (checkpoint,) = (models / "backwards").glob("checkpoint-*")
    result = cli("diagnose", "gradients", checkpoint, *SMALL, "--output", "out")
    assert result.code == 0, result.err
    assert "reverse" in head_of(tmp_path / "out")["task"]


def test_initialisations_of_a_configuration(cli: CLI, tmp_path: Path) -> None:
    """Untrained models are initialised as training would initialise them."""
    config = tiny("reverse", tmp_path / "run")
    write_config(config, tmp_path / "c.yaml")
    options = [*SMALL, "--init", "default,orthogonal", "--output", "out"]
    result = cli("diagnose", "gradients", "c.yaml", *options)
    assert result.code == 0, result.err
    torch.manual_seed(config.seed)
    assert config.model is not None
    expected = RecurrentLM(
        build_config(
            RecurrentConfig,
            {"vocab_size": 9, **config.model, "mixer": {"kind": "gru", "init": "default"}},
        )
    )
    found = head_of(tmp_path / "out")["subjects"]
    assert list(found) == ["c, default", "c, orthogonal"]
    assert len(set(found.values())) == 2
    assert found["c, default"] == expected.fingerprint()


def test_fill_of_a_configuration(cli: CLI, tmp_path: Path) -> None:
    """Weights that a configuration sets before training are set in its untrained model too."""
    name = "blocks.0.mixer.cell.weight_hh_l0"
    config = tiny("reverse", tmp_path / "run", fill={name: 0.05})
    write_config(config, tmp_path / "c.yaml")
    result = cli("diagnose", "gradients", "c.yaml", *SMALL, "--output", "out")
    assert result.code == 0, result.err
    torch.manual_seed(config.seed)
    assert config.model is not None
    expected = RecurrentLM(build_config(RecurrentConfig, {"vocab_size": 9, **config.model}))
    with torch.no_grad():
        expected.get_parameter(name).fill_(0.05)
    assert head_of(tmp_path / "out")["subjects"] == {"c.yaml": expected.fingerprint()}


@pytest.mark.parametrize(
    "options", [["--text", "a.txt"], ["--task", "{kind: text, data: [a.txt]}"]]
)
def test_a_text(options: list[str], cli: CLI, models: Path, tmp_path: Path) -> None:
    """`--text` gives a task to a model without a recorded one."""
    (tmp_path / "a.txt").write_text("It was a dark and stormy night. " * 20)
    result = cli("diagnose", "gradients", models / "text", *options, *SMALL, "--output", "out")
    assert result.code == 0, result.err
    assert "a.txt" in head_of(tmp_path / "out")["task"]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--task", "revers"], ("revers", "reverse")),
        (["--task", "{kind: reverse, vocab: 3}"], ("vocab",)),
        (["--task", "{a"], ("task",)),
        (["--task", "[1]"], ("task",)),
        (["--task", "{vocab_size: 8}"], ("kind",)),
        (["--task", "reverse"], ("33",)),
        (["--text", "none.txt"], ("none.txt",)),
        (["--text", "none.txt", "--task", "reverse"], ("--task",)),
        (["--lengths", "1"], ()),
        (["--lengths", "x"], ("'x'",)),
        (["--rows", "0"], ()),
        (["--exponents", "0"], ()),
        (["--init", "orthogonal"], ()),
    ],
)
def test_bad_input(options: list[str], says: tuple[str, ...], cli: CLI, models: Path) -> None:
    """Bad input is refused in one sentence, and nothing is written."""
    refused(cli, "diagnose", "gradients", models / "backwards", *SMALL, *options, says=says)


def test_bad_sources(cli: CLI, models: Path, tmp_path: Path) -> None:
    """A missing model, a model without a task, and an unsuitable cell are refused."""
    command = ["diagnose", "gradients"]
    refused(cli, *command, "passkey-tyni", says=("did you mean",))
    refused(cli, *command, "none.yaml", says=("'none.yaml' is neither a file",))
    refused(
        cli,
        *command,
        models / "text",
        says=("--task",),
    )
    short = ["--task", "passkey", "--lengths", "16"]
    refused(cli, *command, models / "text", *short, says=("156", "16"))
    write_config(tiny("passkey", tmp_path / "run"), tmp_path / "m.yaml")
    init = ["m.yaml", "--init"]
    refused(cli, *command, *init, "ortogonal", says=("orthogonal",))
    refused(cli, *command, *init, "orthogonal", says=("mamba2", "long_memory"))
    write_config(tiny("reverse", tmp_path / "run", init_from="x"), tmp_path / "on.yaml")
    refused(cli, *command, "on.yaml", "--init", "default", says=("--init",))
