"""Every command, file and page that the documents name exists and is accepted."""

import argparse
import re
import runpy
import shlex
import sys
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import typer

from longrnn.bundled import names
from longrnn.cli.app import app
from longrnn.cli.train import COMMANDS
from longrnn.imports import import_given
from longrnn.training.config import configured
from tests.guide import forgotten, write_examples

ROOT = Path(__file__).parents[1]
DOCUMENTS = sorted(
    path.relative_to(ROOT).as_posix()
    for pattern in ("*.md", "docs/**/*.md", "eval/**/*.md", "configs/**/*.md")
    for path in ROOT.glob(pattern)
    if path.name != "CHANGELOG.md"
)
# The exit code of an argparse program that has accepted its options.
PARSED = 99
# Stands for words that a document omits.
ELLIPSIS = "…"
# The error for an invalid command line, from the click that typer vendors or depends on.
UsageError: Any = typer.BadParameter.__bases__[0]


def commands(text: str) -> Iterator[tuple[str, bool]]:
    """Commands of a page, and whether each is complete (in a code block) or only mentioned."""
    for block in re.findall(r"^ *```\w*\n(.*?)^ *```", text, re.DOTALL | re.MULTILINE):
        for line in block.replace("\\\n", " ").splitlines():
            yield line.strip().removeprefix("$ "), True
    prose = re.sub(r"^ *```.*?^ *```", "", text, flags=re.DOTALL | re.MULTILINE)
    for name in re.findall(r"`([^`]+)`", prose):
        yield re.sub(r"[\[\]]", "", " ".join(name.split())), False


def words_of(line: str) -> list[str] | None:
    """The words of a command of this project; None for any other line."""
    line = re.sub(r"^([A-Z_]+=\S+ )+", "", line)
    if not re.match(r"(longrnn|python|accelerate|make|pytest)\s+\S", line):
        return None
    try:
        words = shlex.split(line, comments=True)
    except ValueError:  # output that begins with the name of a command
        return None
    return [word for word in words if word != ELLIPSIS]


def cases() -> list[Any]:
    """`(document, words, complete)` of every command."""
    found = []
    for document in DOCUMENTS:
        seen = set()
        for line, complete in commands((ROOT / document).read_text()):
            words = words_of(line)
            if words and (line, complete) not in seen:
                seen.add((line, complete))
                found.append(pytest.param(words, complete, id=f"{document}: {line}"))
    return found


def parse(command: Any, words: list[str], complete: bool) -> None:
    """Parses the words of a command without running it."""
    words = list(words)
    while hasattr(command, "commands"):
        if not words:
            return
        name = words.pop(0)
        if name.startswith("--"):  # of the group itself
            continue
        found = command.get_command(typer.Context(command), name)
        assert found is not None, f"no command {name!r}"
        command = found
    try:
        command.make_context(command.name, words)
    except UsageError as error:
        if complete or type(error).__name__ != "MissingParameter":
            pytest.fail(error.format_message())


# What typer builds anew at every call.
longrnn_commands = cache(partial(typer.main.get_command, app))


def parse_longrnn(words: list[str], complete: bool) -> None:
    parse(longrnn_commands(), words, complete)
    if words[0] == "launch":
        if "--config_file" in words:
            given = words[words.index("--config_file") + 1]
            assert given in [*names("configs/accelerate"), "FILE"]
        for name in COMMANDS:
            if name in words:
                parse_longrnn(words[words.index(name) :], complete)
    if words[0] == "train" and len(words) > 1 and words[1] in names("configs/train"):
        overrides = [word for word in words[2:] if not word.startswith("--")]
        configured(words[1], overrides)


def parse_script(path: Path, words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(path.parent)
    if "argparse" in path.read_text() or "studies" in path.read_text():
        parse_program(str(path), runpy.run_path, words, monkeypatch)
        return
    new, script = typer.Typer(), runpy.run_path(str(path))
    new.command()(script[path.stem])
    parse(typer.main.get_command(new), words, True)


def parse_program(
    name: str, start: Callable[..., Any], words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Starts an argparse program, up to the parsing of its options."""
    real = argparse.ArgumentParser.parse_args

    def only_parse(parser: argparse.ArgumentParser, *arguments: Any) -> None:
        real(parser, *arguments)
        raise SystemExit(PARSED)

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", only_parse)
    monkeypatch.setattr(sys, "argv", [name, *words])
    # runpy warns about a module that is already imported
    monkeypatch.delitem(sys.modules, name, raising=False)
    with pytest.raises(SystemExit) as leaving:
        start(name, run_name="__main__")
    assert leaving.value.code == PARSED


@pytest.mark.parametrize(("words", "complete"), cases())
def test_every_command_is_accepted(
    words: list[str], complete: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(ROOT)
    if words[:2] == ["accelerate", "launch"]:
        return  # the sentence is about accelerate
    program, *rest = words
    if program == "longrnn" and "--import" in rest:
        write_examples(tmp_path)
        with forgotten():
            files = [str(tmp_path / word) if word.startswith("my_") else word for word in rest]
            parse_longrnn(import_given(files), complete)
    elif program == "longrnn":
        parse_longrnn(rest, complete)
    elif program == "make":
        assert re.search(rf"^{rest[0]}:", (ROOT / "Makefile").read_text(), re.MULTILINE)
    elif program == "pytest" or rest[:2] == ["-m", "pytest"]:
        assert all((ROOT / word).exists() for word in rest if "/" in word)
    elif rest == ["-m"] or rest[0] == "-c":
        return  # the sentence is about the option, or code
    elif rest[0] != "-m":
        parse_script(ROOT / rest[0], rest[1:], monkeypatch)
    elif rest[1].startswith("benchmarks."):
        parse_program(rest[1], runpy.run_module, rest[2:], monkeypatch)
    else:
        known = {"longrnn.cli", "benchmarks", "tests.golden"}
        assert rest[1] in known, f"no module {rest[1]}"


@pytest.mark.parametrize("document", DOCUMENTS)
def test_every_file_that_is_named_exists(document: str) -> None:
    text, folders = (ROOT / document).read_text(), "benchmarks|configs|docs|eval|scripts|tests"
    links = [link for link in re.findall(r"\]\(([^)#\s]+)[^)]*\)", text) if "://" not in link]
    assert [link for link in links if not (ROOT / document).parent.joinpath(link).exists()] == []
    named = set(re.findall(rf"(?<![\w/.])((?:longrnn|{folders})/[\w./*-]+\.\w+)", text))
    assert [path for path in named if "NAME" not in path and not any(ROOT.glob(path))] == []
