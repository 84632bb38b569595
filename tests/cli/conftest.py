"""Runs the command line in this process, and makes tiny checkpoints for it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import pytest
import torch
import typer

from longrnn.cli.app import run
from longrnn.config import build_config
from longrnn.models import RecurrentConfig, RecurrentLM
from longrnn.models.checkpoint import save_model
from tests.training.runs import LSTM, tiny, train


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
    torch.manual_seed(0)
    save_model(RecurrentLM(build_config(RecurrentConfig, LSTM)), root / "text")
    train(tiny("reverse", root / "backwards", max_steps=4))
    return root


# The commands with their parameters, which typer builds anew for every call.
_commands = cache(typer.main.get_command)


@pytest.fixture
def cli(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> CLI:
    """Runs `longrnn …` in an empty folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(typer.main, "get_command", _commands)

    def call(*arguments: str | Path) -> Outcome:
        monkeypatch.setattr(sys, "argv", ["longrnn", *map(str, arguments)])
        capsys.readouterr()
        with pytest.raises(SystemExit) as leaving:
            run()
        code = leaving.value.code
        assert code is None or isinstance(code, int)
        printed = capsys.readouterr()
        return Outcome(code or 0, printed.out, printed.err)

    return call


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
    before = contents(Path.cwd())
    assert_refused(cli(*arguments), *says)
    assert contents(Path.cwd()) == before


def commands(
    group: Any, above: tuple[str, ...] = (), *, groups: bool = False
) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yields the names and the click command of every command below a group."""
    context = typer.Context(group)
    for own in group.list_commands(context):
        command, name = group.get_command(context, own), (*above, own)
        is_group = hasattr(command, "commands")
        if groups or not is_group:
            yield name, command
        if is_group:
            yield from commands(command, name, groups=groups)
