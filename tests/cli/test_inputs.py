"""Every file and every seed of every command: bad input is refused in one sentence, without delay.

The commands and their parameters are read from the typer app, so that new commands are tested too.

"""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import NamedTuple

import pytest
import typer

from longrnn.cli.app import app
from tests.cli.conftest import CLI, Outcome, commands
from tests.training.runs import tiny, write_config

# Parameters that name a file or folder to read though their type is text.
READ = {"checkpoint", "checkpoints", "sources", "source", "mitigation", "suites", "tokenizer"}
# Parameters of type Path that are written.
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
    "words": "doctor",
}
# Options that keep a command short where what is tried is accepted, or that it needs to get there.
SHORT = {
    ("eval", "passkey"): ["--lengths", "160", "--depths", "1", "--n", "1"],
    ("eval", "task"): ["--task", "reverse", "--vocab-size", "8", "--lengths", "4", "--n", "1"],
    ("eval", "perplexity"): ["--lengths", "64"],
    ("diagnose", "states"): ["--train-length", "16", "--length", "64"],
    ("diagnose", "memory"): ["--positions", "16"],
    ("diagnose", "gradients"): ["--lengths", "4"],
    ("calibrate",): ["--train-length", "16"],
    ("generate",): ["--max-new-tokens", "1"],
}
SECONDS = 60


class Parameter(NamedTuple):
    """One parameter of one command; `flag` is None for an argument."""

    command: tuple[str, ...]
    name: str
    flag: str | None
    is_path: bool
    is_whole: bool
    required: bool

    def __str__(self) -> str:
        return f"{' '.join(self.command)} {self.flag or self.name}"


def parameters() -> list[Parameter]:
    """Every parameter of every command."""
    found = []
    for name, command in commands(typer.main.get_command(app)):
        for one in command.params:
            flag = max(one.opts, key=len) if one.opts[0].startswith("-") else None
            is_path, is_whole = one.metavar == "PATH", one.metavar == "NUMBER"
            found.append(Parameter(name, one.name, flag, is_path, is_whole, one.required))
    return found


PARAMETERS = parameters()
READABLE = [p for p in PARAMETERS if (p.is_path and p.name not in WRITTEN) or p.name in READ]
WRITABLE = [p for p in PARAMETERS if p.is_path and p.name in WRITTEN]
NUMBERS = [p for p in PARAMETERS if p.is_whole or p.name == "seed"]


def test_the_commands_are_found() -> None:
    names = {parameter.command for parameter in PARAMETERS}
    assert {("train",), ("eval", "passkey"), ("data", "build"), ("diagnose", "states")} <= names
    assert len(READABLE) > 25
    assert len(WRITABLE) > 10
    assert len(NUMBERS) > 10


@pytest.fixture(scope="session")
def shelf(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with models and good inputs."""
    folder = models
    (folder / "good.txt").write_text("One sentence and another one. " * 40)
    write_config(tiny("reverse", Path("run"), max_steps=1), folder / "good.yaml")
    return folder


@pytest.fixture
def bad(tmp_path: Path) -> dict[str, str]:
    """Paths and texts that no command accepts."""
    folder = tmp_path.parent / f"{tmp_path.name}-bad"
    folder.mkdir()
    (folder / "folder").mkdir()
    contents = {
        "empty": b"",
        "binary": bytes(range(256)) * 4,
        "latin1": b"caf\xe9: \xe9\n",
        "words": b"just words",
        "list.yaml": b"- 1\n- {a: b}\n",
        "deep.yaml": b"[" * 5000,
        "date.yaml": b"format: 2024-99-99\n",
        "broken.yaml": b"a: [\n",
        "keys.yaml": b"1: 2\n[a]: 3\n",
    }
    for name, content in contents.items():
        (folder / name).write_bytes(content)
    os.mkfifo(folder / "fifo")
    paths = {path.name: str(path) for path in folder.iterdir()}
    long = {"long": "x" * 5000, "surrogate": os.fsdecode(b"caf\xe9.txt"), "none": ""}
    return {"missing": "nowhere/at.all", "zero": "/dev/zero", **long, **paths}


BAD = (
    "missing",
    "zero",
    "long",
    "surrogate",
    "none",
    "folder",
    "empty",
    "binary",
    "latin1",
    "fifo",
)
# Any text is a text, and may be a tokenizer or a task that is looked up.
TEXTS = ("words", "list.yaml", "deep.yaml", "date.yaml", "broken.yaml", "keys.yaml")


class TooLate(BaseException):
    """Not an error that a command may turn into a sentence."""


@contextmanager
def soon(what: object) -> Iterator[None]:
    """Fails a command that reads from a device or a pipe forever."""

    def late(number: int, frame: FrameType | None) -> None:
        raise TooLate(f"{what}: still reading after {SECONDS} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


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
    if parameter.command == ("diagnose", "states") and parameter.name != "text":
        options.append(f"--text={shelf / 'good.txt'}")
    if parameter.command == ("generate",) and parameter.name != "prompt_file":
        options.append("--prompt=a")
    line = [*arguments, *SHORT.get(parameter.command, []), *options]
    with soon(parameter):
        return cli(*parameter.command, *line)


def complaints(result: Outcome, name: str, *, refused: bool) -> list[str]:
    """What is wrong with a result: the code must be 0, or 2 with one sentence or usage."""
    lines = result.err.splitlines()
    errors = [line for line in lines if line.startswith("error: ")]
    if result.code not in (0, 2) or "Traceback" in result.err:
        return [f"{name}: exit code {result.code}: {result.err}"]
    if result.code == 2 and "Usage:" not in result.err and errors != lines[-1:]:
        return [f"{name}: not one sentence: {result.err}"]
    if refused and result.code == 0:
        return [f"{name}: accepted: {result.out}"]
    return []


@pytest.mark.parametrize("parameter", READABLE, ids=str)
def test_what_cannot_be_read_is_refused(
    parameter: Parameter, cli: CLI, shelf: Path, bad: dict[str, str]
) -> None:
    assert {*BAD, *TEXTS} == set(bad)
    if parameter.command == ("eval", "harness") and parameter.name != "checkpoint":
        pytest.skip("lm-eval's own options are tested in tests/evaluation/harness")
    wrong = []
    for name in (*BAD, *TEXTS):
        result = call(cli, parameter, bad[name], shelf)
        wrong += complaints(result, name, refused=name in BAD and name != "none")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("parameter", WRITABLE, ids=str)
def test_what_cannot_be_written_is_refused(
    parameter: Parameter, cli: CLI, shelf: Path, bad: dict[str, str]
) -> None:
    wrong = []
    for name, path in (
        ("a file", bad["words"]),
        ("below a file", f"{bad['words']}/below"),
        ("a pipe", bad["fifo"]),
        ("a device", "/dev/full"),
        ("too long", bad["long"]),
    ):
        wrong += complaints(call(cli, parameter, path, shelf), name, refused=True)
    assert not wrong, "\n".join(wrong)
    assert Path(bad["words"]).read_bytes() == b"just words"


@pytest.mark.parametrize("parameter", NUMBERS, ids=str)
def test_numbers_that_no_machine_holds(parameter: Parameter, cli: CLI, shelf: Path) -> None:
    """They are refused, or the command takes as many as there are."""
    wrong = []
    for number in (-(2**63) - 1, 2**64, 10**30) if parameter.name == "seed" else (10**21,):
        wrong += complaints(call(cli, parameter, str(number), shelf), str(number), refused=False)
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    "content",
    [b"", b"a: [\n", b"caf\xe9: 1\n", b"- a\n", b"words", b"\0", b"task: 3\n", b"task: {kind: 3}\n"]
    + [b"length: x\n", b"length: {max: soon}\n", b"max_grad_norm: {a: 1}\n", b"a: 2024-99-99\n"],
    ids=repr,
)
def test_a_damaged_record_of_training_is_named(
    content: bytes, cli: CLI, shelf: Path, tmp_path: Path
) -> None:
    """A checkpoint's train.yaml that is damaged is named by every command that reads it."""
    shutil.copytree(shelf / "backwards", "run")
    Path("run/train.yaml").write_bytes(content)
    text = str(shelf / "good.txt")
    for arguments in (
        ["eval", "task", "run"],
        ["diagnose", "gradients", "run"],
        ["calibrate", "run", "--text", text, "--method", "state_norm"],
        ["report", "run"],
        ["train", "--resume", "run", "--quiet"],
    ):
        result = cli(*arguments)
        assert result.code == 2, arguments
        assert "run/train.yaml" in result.err or "results" in result.err, result.err
        assert "unexpected" not in result.err
        assert len(result.err.splitlines()) == 1
