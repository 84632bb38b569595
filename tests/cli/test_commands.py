"""Every command explains itself, and does what its help says, on tiny checkpoints."""

import re
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from matplotlib.figure import Figure

from longrnn import generate, load
from longrnn.cli.app import app
from longrnn.text import ByteTokenizer
from tests.cli.conftest import CLI, Shelf, commands, refused, table
from tests.conftest import not_drawn
from tests.guide import forgotten
from tests.texts import DATA
from tests.training.runs import metrics, tiny, train

PERPLEXITY = "eval perplexity TEXT --text book.txt --lengths"
STATES = "diagnose states TEXT --length 600 --train-length 64"
GRADIENTS = "diagnose gradients"
CALIBRATE = "calibrate SHORT --text filler.txt --text book.txt --method"
# A command, what it prints, and a file that it writes below results/.
CASES = (DATA / "commands.txt").read_text()
SHORTHANDS = ("PERPLEXITY", "STATES", "GRADIENTS", "CALIBRATE")
ROWS = table(CASES, {name: globals()[name] for name in SHORTHANDS})
# Of each command, the first row, in which its pictures are drawn.
DRAWN = {command.split("TEXT")[0].split("RUN")[0]: command for command, _ in reversed(ROWS)}


@pytest.mark.parametrize(
    ("command", "printed"),
    [
        pytest.param(*row, id=row[0], marks=[pytest.mark.pictures] * (row[0] in DRAWN.values()))
        for row in ROWS
    ],
)
def test_a_command_prints_its_results_and_its_files(
    command: str, printed: list[str], cli: CLI, shelf: Shelf, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A dry run writes none. The same command again prints the same, and measures nothing."""
    words = shelf(command)
    result = cli(*words)
    assert (result.code, result.err) == (0, "")
    for piece in printed:
        assert piece.replace("LLAMA", "llama") in result.out
    assert "--dry-run" not in words or not Path("run").exists()
    files = {Path(line) for line in result.out.splitlines() if line.startswith("results/")}
    for folder in {file.parent for file in files}:
        assert set(folder.iterdir()) - {folder / "rows.jsonl"} == files
    rows = [path for file in files for path in file.parent.glob("rows.jsonl")]
    if not rows:
        return
    written = [path.read_bytes() for path in rows]
    monkeypatch.setattr(Figure, "savefig", not_drawn)
    assert cli(*words).out == result.out
    assert [path.read_bytes() for path in rows] == written


def test_a_launch_divides_its_words_at_the_first_command(
    cli: CLI, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A configuration may have the name of a command; processes import what the launch names."""
    seen: list[Any] = []
    monkeypatch.setattr("longrnn.training.launch.launch", lambda *words: seen.extend(words) or 3)
    with forgotten():
        words = "launch --import json --cpu train finetune --import=abc seed=1"
        assert cli(*words.split()).code == 3
    imports = ["--import", "json", "--import", "abc"]
    assert seen == [["--cpu"], ["train", *imports, "finetune", "seed=1"]]


def test_generate(cli: CLI, models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prompt, command = "The grass is\n", ["generate", models / "text", "--temperature", "2"]
    ids = torch.tensor([ByteTokenizer().encode(prompt)])
    generated = generate(load(models / "text"), ids, max_new_tokens=30).tokens[0]
    expected = ByteTokenizer().decode(generated)
    (tmp_path / "prompt.txt").write_text(prompt)
    for how in (["--prompt", prompt], ["--prompt-file", "prompt.txt"]):
        printed = cli("generate", models / "text", *how, "--max-new-tokens", "30").out
        assert printed == f"{expected}\n" or expected.endswith("\ufffd")
    one, again, other = (cli(*command, "--prompt", "a", "--seed", s).out for s in ("5", "5", "2"))
    assert one == again != other
    sign = next(c for c in one if c.isascii() and c.isprintable())
    stopped = cli(*command, "--prompt", "a", "--seed", "5", "--stop", "x" * 9, "--stop", sign)
    assert stopped.out == one[: one.index(sign) + 1] + "\n"

    def said(*_: Any, stop: Any, **options: Any) -> None:
        ids = list("aé🙂".encode())
        for end in range(len(ids)):
            stop(0, ids[: end + 1])

    monkeypatch.setattr(sys.modules["longrnn.models.generate"], "generate", said)
    assert cli(*command, "--prompt", "a").out == "aé🙂\n", "whole characters"


def test_runs_are_paired_with_those_of_the_baseline(cli: CLI) -> None:
    """By all other settings, the seed included; two runs with its value are not a pair."""
    ends: dict[float, list[float]] = {1e-3: [], 2e-3: []}
    for seed in range(3):
        for rate, losses in ends.items():
            folder = Path(f"runs/{rate}-{seed}")
            train(tiny("reverse", folder, max_steps=2, learning_rate=rate, seed=seed))
            losses.append(metrics(folder)[-1]["loss"])
    report = cli("report", *Path("runs").iterdir(), "--baseline", "learning_rate=1e-3")
    assert report.code == 0, report.err
    assert "loss, difference from learning_rate=1e-3" in report.out
    row = next(line for line in report.out.splitlines() if "learning_rate=0.002 | 3 |" in line)
    mean = sum(b - a for a, b in zip(*ends.values(), strict=True)) / 3
    assert f"{mean:+.4g}".replace("-", "−") in row
    shutil.copytree("runs/0.001-0", "copy")
    equal = ["runs/0.001-0", "copy", "--baseline"]
    for baseline, says in (("learning_rate=1e-3", "no two runs"), ("seed=9", "seed")):
        refused(cli, "report", *equal, baseline, says=(says,))


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
