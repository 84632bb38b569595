"""Every long command, killed at random moments and run again, ends with the same results.

LONGRNN_KILLS is the number of kills for each command.
"""

import json
import os
import random
import shutil
import signal
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors import safe_open

from tests.cli.conftest import table
from tests.texts import DATA
from tests.training.forks import Fork
from tests.training.runs import LSTM, saved, tiny, write_config

pytestmark = pytest.mark.core

KILLS = int(os.environ.get("LONGRNN_KILLS", "6"))
# What a clock or a draft of a name says, and differs between equal runs.
SUMS = "checksums.json"
CLOCK = {"tokens_per_second", "seconds", "time", "date", "steps_per_second"}


# By its name, a command that is killed, and the one that continues its run where it is another.
COMMANDS = dict(table((DATA / "kills.txt").read_text(), {}))


@pytest.fixture(scope="module")
def shelf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Models, configurations and texts for the commands."""
    folder = tmp_path_factory.mktemp("shelf")
    saved(folder / "model", LSTM)
    saved(folder / "mamba2")
    rng = random.Random(0)
    words = [f"{rng.choice('bdklmnprst')}{rng.choice('aeiou')}" for _ in range(3000)]
    (folder / "text.txt").write_text(" ".join(words))
    long = {"max_steps": 60, "save_steps": 5, "logging_steps": 5, "length": {"max": 6}}
    write_config(tiny("reverse", Path("out"), **long), folder / "train.yaml")
    write_config(tiny("reverse", Path("out"), max_steps=20), folder / "short.yaml")
    suite = "evaluations: [{kind: passkey, lengths: [180, 240], depths: [0, 1], n: 4}]"
    (folder / "suite.yaml").write_text(suite)
    return folder


def start(lines: list[str], shelf: Path, folder: Path, *, again: bool) -> Fork:
    begun = again and (folder / "out/train.yaml").is_file()
    arguments = lines[-1 if begun else 0].format(shelf=shelf, out=folder / "out").split()
    return Fork(*arguments, folder=folder.parent / "log")


def results(folder: Path) -> dict[str, Any]:
    """The contents of all files without times, rows sorted; fails at a broken one.

    Reports hold times. Checksums are of training.pt, whose pickled bytes differ where its content
    is equal. The last row of results may be incomplete.
    """
    readers: Mapping[str, Callable[[Path], Any]] = {
        ".json": lambda path: json.loads(path.read_text()),
        ".jsonl": lambda path: sorted(map(row, path.read_text().split("\n")[:-1])),
        ".yaml": lambda path: yaml.safe_load(path.read_text()),
        ".safetensors": lambda path: path.read_bytes() if safe_open(path, "pt").keys() else 1 / 0,
        ".pt": lambda path: str(torch.load(path, weights_only=True)),
        ".html": lambda path: path.read_text().rstrip().endswith("</html>") or 1 / 0,
        ".png": lambda path: path.read_bytes().endswith(b"IEND\xaeB`\x82") or 1 / 0,
    }
    found = {}
    for path in sorted((folder / "out").rglob("*")):
        hidden = any(part.startswith(".") for part in path.relative_to(folder).parts)
        if path.is_file() and not hidden and path.name != SUMS:
            try:
                read = readers.get(path.suffix, Path.read_bytes)(path)
            except Exception as error:
                raise AssertionError(f"{path} is broken after a kill: {error}") from error
            found[str(path.relative_to(folder))] = without_clock(read)
    return found


def row(line: str) -> str:
    return json.dumps(without_clock(json.loads(line)), sort_keys=True)


def is_done(process: Fork, code: int) -> bool:
    """Whether a command ended, or found that the killed one had written everything."""
    return code == 0 or (code == 2 and "exists already" in process.err)


def without_clock(value: Any) -> Any:
    if isinstance(value, dict):
        if value.get("evaluation") == "cost":
            return "cost"
        return {k: without_clock(v) for k, v in value.items() if k not in CLOCK}
    return [without_clock(v) for v in value] if isinstance(value, list) else value


@pytest.mark.parametrize(
    ("name", "count"),
    [
        *(pytest.param(name, KILLS, marks=pytest.mark.slow) for name in COMMANDS),
        # Kills of train and data build in the default suite are beside their other tests.
        *(("finetune", 1), ("passkey", 1)),
    ],
)
def test_a_killed_command_ends_with_the_same_results(
    name: str, count: int, shelf: Path, tmp_path: Path
) -> None:
    command, folder = COMMANDS[name], tmp_path / "work"
    folder.mkdir()
    begun = time.monotonic()
    whole = start(command, shelf, folder, again=False)
    assert whole.end() == 0, whole.err
    lasts = time.monotonic() - begun
    wanted, printed = results(folder), whole.out
    assert wanted
    rng, kills, tries = random.Random(name), 0, 0
    while kills < count:
        shutil.rmtree(folder / "out", ignore_errors=True)
        killed = False
        for _ in range(rng.randint(1, 3)):
            tries += 1
            assert tries < 10 * count, f"{name} ends before it is killed"
            begun = time.monotonic()
            process = start(command, shelf, folder, again=kills > 0)
            process.process.join(rng.uniform(0.1, 0.98) * lasts)
            with suppress(ProcessLookupError):  # it has just ended
                process.send(signal.SIGKILL)
            code = process.end()
            assert code == -signal.SIGKILL or is_done(process, code), process.err
            results(folder)
            killed = code == -signal.SIGKILL
            kills += killed
            if not killed:  # the first attempt also started the server of the forks
                lasts = min(lasts, time.monotonic() - begun)
            if not killed or kills == count:
                break
        if killed:
            last = start(command, shelf, folder, again=True)
            code = last.end()
            assert is_done(last, code), last.err
            if code == 0:
                ends = last.out.replace(" is built already", "").splitlines()[-1:]
                assert ends == printed.splitlines()[-1:]
        assert results(folder) == wanted
