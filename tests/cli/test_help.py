"""Every command and every group of commands explains itself, with an example."""

from __future__ import annotations

import re

import pytest
import typer

from longrnn.cli.app import app
from tests.cli.conftest import CLI, commands

ROOT = typer.main.get_command(app)
COMMANDS = {(): ROOT, **dict(commands(ROOT, groups=True))}


@pytest.mark.parametrize("name", COMMANDS, ids=" ".join)
def test_help_has_an_example_and_describes_every_parameter(name: tuple[str, ...], cli: CLI) -> None:
    result = cli(*name, "--help")
    assert result.code == 0
    assert "Usage: longrnn" in result.out
    assert re.search(r"<\w+>|list\[", result.out) is None  # types of Python
    assert f"Example: {' '.join(('longrnn', *name))} " in " ".join(result.out.split())
    parameters = COMMANDS[name].params
    assert [one.name for one in parameters if not getattr(one, "help", None)] == []
