"""`--import`: files of users are named in YAML and on the command line, and by nothing else."""

import importlib
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import typer

from longrnn import load
from longrnn.cli import app
from longrnn.errors import UserError
from longrnn.hf.auto import LongRNNForCausalLM
from tests.cli.conftest import CLI, Outcome, Shelf, assert_refused
from tests.guide import forgotten, write_examples
from tests.training.runs import tiny, write_config

BUILD = typer.main.get_command
Users = Callable[[str], Outcome]


@pytest.fixture
def users(cli: CLI, shelf: Shelf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Users:
    """Runs a command as a process of its own would, where the files of the guide are."""
    # Evaluations add commands.
    monkeypatch.setattr(typer.main, "get_command", BUILD)
    monkeypatch.setattr(app._eval, "registered_commands", [*app._eval.registered_commands])
    write_examples(tmp_path)
    small = {"model": {"d_model": 16, "n_layers": 1}, "initial_state": {"kind": "zero"}}
    write_config(tiny("pass", Path("run"), **small), tmp_path / "text.yaml")
    write_config(tiny("reverse", Path("run")), tmp_path / "sequences.yaml")

    def call(command: str) -> Outcome:
        with forgotten():
            return cli(*shelf(command))

    return call


def succeed(users: Users, command: str, *printed: str) -> None:
    result = users(command)
    assert (result.code, result.err) == (0, ""), command
    for piece in printed:
        assert piece in result.out


def test_a_cell_of_a_user_is_trained_mitigated_measured_and_resumed(
    users: Users, tmp_path: Path
) -> None:
    file, short = "--import my_scan.py", "--lengths 160 --depths 1 --n 1"
    mixer = "'model.mixer={kind: gated_linear, n_heads: 2}'"
    succeed(users, f"train text.yaml {file} {mixer} max_steps=2", "trained for 2 steps")
    succeed(users, f"info --import={file.split()[1]} run", "× gated_linear", "mixer gated_linear")
    mitigations = "run+forget_more(decay_scale=0.5) run+state_norm(threshold=1)"
    mitigations += " run+sliding_window(window=64)"
    succeed(users, f"eval passkey run {mitigations} {short} --import my_scan", "keys recalled")
    succeed(users, f"eval perplexity --text book.txt {file} --lengths 64 run", "bits per byte")
    states = "diagnose states run --text book.txt --length 600"
    succeed(users, f"{file} {states}", "diagnosis.yaml")
    succeed(users, f"train --resume run max_steps=3 {file}", "trained for 3 steps")
    commands = ["info run", "info run/checkpoint-00000003", "train --resume run max_steps=4"]
    commands += ["train run/train.yaml output_dir=again", f"eval passkey run {short}"]
    for command in commands:
        assert_refused(users(command), "my_scan.py", "--import")
    with pytest.raises(UserError, match=r"my_scan\.py"):
        LongRNNForCausalLM.from_pretrained("run")
    with forgotten():
        sys.path.append(str(tmp_path))
        importlib.import_module("my_scan")
        fingerprint = load("run").fingerprint()
        (tmp_path / "my_scan.py").write_text(f"{(tmp_path / 'my_scan.py').read_text()}# changed")
        assert load("run").fingerprint() != fingerprint


def test_a_task_an_encoding_and_a_mitigation_of_a_user(users: Users) -> None:
    given = "--import my_task.py --import my_encoding.py --import my_mitigation.py"
    names = "task.kind=increment model.position.kind=logarithm 'mitigation=mine(factor=0.5)'"
    mixer = "'model.mixer={kind: mamba2, d_state: 4, head_dim: 8}'"
    train = f"train sequences.yaml {names} {mixer} max_steps=3"
    succeed(users, f"{train} {given}", "trained for 3 steps")
    run = "run"
    succeed(users, f"eval task {run} --lengths 5 --n 2 {given}", "token accuracy")
    succeed(users, f"info {run} {given}", "mine(factor=0.5)", "task increment")
    succeed(users, f"train --resume {run} max_steps=4 {given}", "trained for 4 steps")
    for file in ("my_task.py", "my_encoding.py", "my_mitigation.py"):
        others = given.replace(f"--import {file}", "")
        assert_refused(users(f"train --resume {run} max_steps=5 {others}"), file, "--import")


def test_an_evaluation_of_a_user_is_a_command_and_a_kind_of_suites(
    users: Users, tmp_path: Path
) -> None:
    given = "--import my_evaluation.py"
    succeed(users, f"eval accuracy {given} TEXT --text book.txt --lengths 64", "accuracy")
    suite = "evaluations: [{kind: accuracy, texts: [book.txt], lengths: [64]}]"
    (tmp_path / "own.yaml").write_text(suite)
    succeed(users, f"compare TEXT TEXT+forget_more --suite own.yaml {given}", "difference from")
    assert_refused(users("compare TEXT --suite own.yaml"), "accuracy")
