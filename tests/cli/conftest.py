"""Runs the command line in this process, and makes tiny checkpoints for it."""

import os
import shlex
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, Protocol
from unittest.mock import patch

import pytest
import torch
import typer
import yaml

from longrnn.cli.app import run
from longrnn.progress import QUIET
from tests.checkpoints.test_rnn_weights import TorchModel
from tests.hf.foreign import causal, with_bytes
from tests.texts import DATA
from tests.training.runs import LSTM, saved, tiny, train, write_config


class Outcome(NamedTuple):
    code: int
    out: str
    err: str


class CLI(Protocol):
    def __call__(self, *arguments: str | Path) -> Outcome: ...


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `text` (a byte-level model) and `backwards` (a short run on reverse)."""
    root = tmp_path_factory.mktemp("models")
    saved(root / "text", LSTM)
    train(tiny("reverse", root / "backwards", max_steps=4))
    return root


# The commands with their parameters, which typer builds anew for every call.
_commands = cache(typer.main.get_command)


@pytest.fixture
def cli(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> Iterator[CLI]:
    """Runs `longrnn …` in an empty folder and in this process, whose environment stays."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(typer.main, "get_command", _commands)
    # Of `--import`, which may not leave anything in the folder that a test compares.
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(sys, "dont_write_bytecode", True)

    def call(*arguments: str | Path) -> Outcome:
        monkeypatch.setattr(sys, "argv", ["longrnn", *map(str, arguments)])
        capsys.readouterr()
        with pytest.raises(SystemExit) as leaving:
            run()
        code = leaving.value.code
        assert code is None or isinstance(code, int)
        printed = capsys.readouterr()
        return Outcome(code or 0, printed.out, printed.err)

    # `launch` sets variables for its processes.
    with patch.dict(os.environ, {QUIET: "1"}):
        yield call


def assert_refused(result: Outcome, *pieces: str, code: int = 2) -> None:
    """Asserts one line on standard error with all pieces, and nothing on standard output."""
    assert result.code == code
    assert result.out == ""
    lines = result.err.splitlines()
    assert len(lines) == 1, result.err
    assert lines[0].startswith("error: ")
    for piece in pieces:
        assert piece in lines[0]


def contents(folder: Path) -> dict[Path, bytes | None]:
    """All files below a folder with their bytes; None for folders."""
    return {p: p.read_bytes() if p.is_file() else None for p in folder.rglob("*")}


def refused(cli: CLI, *arguments: str | Path, says: tuple[str, ...] = ()) -> None:
    """Runs a command that must be refused and must leave its folder as it was."""
    kept = contents(Path.cwd())
    assert_refused(cli(*arguments), *says)
    assert contents(Path.cwd()) == kept


def commands(
    group: Any, above: tuple[str, ...] = (), *, groups: bool = False
) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yields the names and the click command of every command below a group."""
    context = typer.Context(group)
    for own in group.list_commands(context):
        command, name = group.get_command(context, own), (*above, own)
        is_group = hasattr(command, "commands")
        if (groups or not is_group) and not command.hidden:
            yield name, command
        if is_group:
            yield from commands(command, name, groups=groups)


@pytest.fixture(scope="session")
def inputs(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the inputs that commands name."""
    root = tmp_path_factory.mktemp("inputs")
    files = yaml.safe_load((DATA / "inputs.yaml").read_text())
    files["book.txt"] = "It was a dark and stormy night. " * 64
    files["filler.txt"] = "The grass is green. The sky is blue. The sun is yellow. " * 39
    for name, content in files.items():
        (root / name).parent.mkdir(exist_ok=True)
        (root / name).write_bytes(content.encode() if isinstance(content, str) else content)
    write_config(tiny("passkey", Path("run")), root / "mamba.yaml")
    write_config(tiny("reverse", Path("run"), init_from="x"), root / "on.yaml")
    with_bytes(causal("llama", vocab_size=256, max_position_embeddings=256), root / "llama")
    with_bytes(causal("mamba2", vocab_size=256), root / "mamba2")
    torch.save(TorchModel("GRU", 1, 4), root / "whole.pt")
    torch.save({"epoch": 3}, root / "numbers.pt")
    (root / "loop").symlink_to("loop")
    shutil.copytree(models / "backwards", root / "damaged")
    shutil.copy(root / "open.yaml", root / "damaged/train.yaml")
    shutil.copytree(models / "text", root / "half")
    with open(root / "half/model.safetensors", "rb+") as file:
        file.truncate(2000)
    return root


Shelf = Callable[[str], list[str]]


@pytest.fixture
def shelf(inputs: Path, models: Path, cli: CLI, tmp_path: Path) -> Shelf:
    """Splits a command in which capitals stand for checkpoints, in a folder with inputs.

    TEXT is a byte-level LSTM, RUN a short run on the task reverse, MODELS the folder of both, LLAMA
    and MAMBA2 are checkpoints of transformers, and SHORT is a name of an embedded checkpoint.
    """
    shutil.copytree(inputs, tmp_path, symlinks=True, dirs_exist_ok=True)
    places = {
        "TEXT": models / "text",
        "RUN": models / "backwards",
        "MODELS": models,
        "LLAMA": "llama",
        "MAMBA2": "mamba2",
        "SHORT": "passkey-tiny-short",
    }

    def split(command: str) -> list[str]:
        for name, place in places.items():
            command = command.replace(name, str(place))
        return shlex.split(command)

    return split


def table(text: str, shorthands: Mapping[str, str]) -> list[tuple[str, list[str]]]:
    """Reads one command per line, and behind it the texts that its output must contain."""
    found = []
    for line in text.strip().splitlines():
        for name, meaning in shorthands.items():
            line = line.replace(name, meaning)
        command, *names = (part.strip() for part in line.split(" |"))
        found.append((command, list(filter(None, names))))
    return found
