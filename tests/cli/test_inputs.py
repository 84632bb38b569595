"""Every file and every number of every command: a bad one is refused in one sentence, and soon.

The commands and their parameters are read from the typer app, so that new commands are tested too.
"""

import os
import re
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import typer

from longrnn.cli.app import app
from tests.cli.conftest import CLI, Outcome, commands
from tests.training.runs import tiny, write_config

# Parameters that name a file or folder to read though their type is text.
READ = {"checkpoint", "checkpoints", "sources", "source", "mitigation", "runs", "suites"}
READ |= {"tokenizer"}
# Parameters that name a file or folder to write.
WRITTEN = {"output", "out", "destination"}
# What a command needs beside the parameter that is tried, by name; a new command may add one.
GOOD = {
    "checkpoint": "{models}/text",
    "checkpoints": "{models}/text",
    "sources": "{models}/backwards",
    "source": "{models}/text",
    "runs": "{models}/backwards",
    "texts": "{models}/good.txt",
    "data": "{models}/good.txt",
    "method": "state_norm",
    "to": "hf",
    "destination": "new",
    "out": "new",
}
# Options that keep a command short where what is tried is accepted, or that it needs to get there.
SHORT = {
    ("eval", "harness"): ["--tasks", "longrnn_passkey"],  # without them, it lists all tasks
    ("eval", "passkey"): ["--lengths", "160", "--depths", "1", "--n", "1"],
    ("eval", "task"): ["--task", "reverse", "--vocab-size", "8", "--lengths", "4", "--n", "1"],
    ("eval", "perplexity"): ["--lengths", "64"],
    ("diagnose", "states"): ["--train-length", "16", "--length", "64"],
    ("diagnose", "memory"): ["--positions", "16"],
    ("diagnose", "gradients"): ["--length", "4"],
    ("calibrate",): ["--train-length", "16"],
    ("generate",): ["--max-new-tokens", "1"],
}
SECONDS = 300


class Parameter(NamedTuple):
    """One parameter of one command; `flag` is None for an argument, `value` is in its help."""

    command: tuple[str, ...]
    name: str
    flag: str | None
    value: str
    required: bool

    def kind(self) -> str | None:
        """What is wrong with a value: a path to read or to write, or a number."""
        if self.name in READ or ("PATH" in self.value and self.name not in WRITTEN):
            return "read"
        if self.name in WRITTEN:
            return "write"
        return "number" if re.search("INTEGER|NUMBER", self.value) else None

    def __str__(self) -> str:
        return f"{' '.join(self.command)} {self.flag or self.name}"


PARAMETERS = [
    Parameter(name, one.name, one.opts[0] if one.opts[0][0] == "-" else None,
              one.metavar or "", one.required)
    for name, command in commands(typer.main.get_command(app)) for one in command.params
]  # fmt: skip
TRIED = [
    one
    for one in PARAMETERS
    # The options of lm-eval are tested in tests/evaluation/harness.
    if one.kind() and (one.command != ("eval", "harness") or one.name == "checkpoint")
]


@pytest.fixture(scope="session")
def shelf(models: Path) -> Path:
    """A folder with models and good inputs."""
    (models / "good.txt").write_text("One sentence and another one. " * 40)
    write_config(tiny("reverse", Path("run"), max_steps=1), models / "good.yaml")
    return models


@pytest.fixture
def bad(tmp_path: Path) -> dict[str, list[str]]:
    """Values that every parameter of a kind refuses."""
    folder = tmp_path.parent / f"{tmp_path.name}-bad"
    folder.mkdir()
    for name, content in (("empty", b""), ("binary", bytes(range(256))), ("latin1", b"caf\xe9: 1")):
        (folder / name).write_bytes(content)
    (folder / "folder").mkdir()
    os.mkfifo(folder / "fifo")
    long, fifo, file = "x" * 5000, str(folder / "fifo"), str(folder / "latin1")
    others = ["nowhere/at.all", "/dev/zero", long, os.fsdecode(b"caf\xe9.txt")]
    return {
        "read": [*others, *map(str, folder.iterdir())],
        "write": [file, f"{file}/below", fifo, "/dev/full", long],
        "number": [str(-(2**63) - 1)],
    }


@pytest.fixture(autouse=True)
def soon() -> Iterator[None]:
    """Fails a command that reads from a device or a pipe forever."""

    def late(*_: Any) -> None:
        raise SystemExit("still reading")

    handler = signal.signal(signal.SIGALRM, late)
    signal.alarm(SECONDS)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, handler)


def call(cli: CLI, parameter: Parameter, value: str, shelf: Path) -> Outcome:
    """Runs the command of a parameter with `value` and all that it requires."""
    arguments, options = [], []
    for one in PARAMETERS:
        if one.command != parameter.command or not (one.required or one == parameter):
            continue
        given = value if one == parameter else GOOD[one.name].format(models=shelf)
        if one.flag is None:
            arguments.append(given)
        else:
            options.append(f"{one.flag}={given}")
    if parameter.command == ("diagnose", "states") and parameter.name != "texts":
        options.append(f"--text={shelf / 'good.txt'}")
    if parameter.command == ("generate",) and parameter.name != "prompt_file":
        options.append("--prompt=a")
    line = [*arguments, *SHORT.get(parameter.command, []), *options]
    return cli(*parameter.command, *line)


@pytest.mark.parametrize("parameter", TRIED, ids=str)
def test_a_bad_value_is_refused_in_one_sentence(
    parameter: Parameter, cli: CLI, shelf: Path, bad: dict[str, list[str]]
) -> None:
    for value in bad[parameter.kind() or ""]:
        result = call(cli, parameter, value, shelf)
        errors = [line for line in result.err.splitlines() if line.startswith("error: ")]
        assert result.code == 2, value
        assert errors == result.err.splitlines()[-1:], value


@pytest.mark.parametrize("line", ["{", "3", '{"tokens": 2}', "[" * 5000])
def test_a_damaged_row_of_metrics_is_named(line: str, cli: CLI, shelf: Path) -> None:
    shutil.copytree(shelf / "backwards", "run")
    rows = Path("run/metrics.jsonl").read_text()
    Path("run/metrics.jsonl").write_text(f"{rows}{line}\n")
    for command in ("report run", "train --resume run"):
        result = cli(*command.split())
        assert (result.code, len(result.err.splitlines())) == (2, 1), result.err
        assert f"run/metrics.jsonl is damaged in line {len(rows.splitlines()) + 1}" in result.err
