"""Every long command, killed at random moments and run again, ends with the same results.

LONGRNN_KILLS is the number of kills for each command.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import yaml
from safetensors import safe_open

from tests.training.forks import Fork
from tests.training.runs import tiny, write_config

pytestmark = pytest.mark.core

KILLS = int(os.environ.get("LONGRNN_KILLS", "6"))
# What a clock or a draft of a name says, and differs between equal runs.
SUMS = "checksums.json"
CLOCK = {"tokens_per_second", "seconds", "time", "date", "steps_per_second"}


class Command(NamedTuple):
    """A command that is killed.

    Attributes:
        arguments: of the first attempt.
        results: files and folders of its results.
        again: arguments of an attempt that continues a run.
    """

    arguments: list[str]
    results: list[str]
    again: list[str] = []


TEXT = ["--text", "{shelf}/text.txt"]
MODEL = "{shelf}/model"
COMMANDS: dict[str, Command] = {
    "train": Command(
        ["train", "{shelf}/train.yaml", "output_dir={out}", "--quiet"],
        ["out"],
        ["train", "--resume", "{out}", "--quiet"],
    ),
    "grid": Command(
        ["train", "{shelf}/short.yaml", "--grid", "seed=1,2", "output_dir={out}", "--quiet"],
        ["out"],
    ),
    "finetune": Command(
        ["finetune", "{shelf}/mamba2", "--data", "{shelf}/text.txt", "--length", "32"]
        + ["max_steps=30", "save_steps=3", "logging_steps=2", "eval_length=64", "eval_samples=2"]
        + ["--evaluate-to", "64", "--output", "{out}", "--quiet"],
        ["out"],
        ["finetune", "--resume", "{out}", "--evaluate-to", "64", "--quiet"],
    ),
    "passkey": Command(
        ["eval", "passkey", MODEL, "--lengths", "160,256", "--n", "8", "--batch-size", "2"]
        + ["--output", "{out}", "--quiet"],
        ["out"],
    ),
    "perplexity": Command(
        ["eval", "perplexity", MODEL, *TEXT, "--lengths", "64", "--batch-size", "1"]
        + ["--output", "{out}", "--quiet"],
        ["out"],
    ),
    "task": Command(
        ["eval", "task", MODEL, "--task", "sort", "--vocab-size", "64", "--lengths", "12"]
        + ["--n", "256", "--output", "{out}", "--quiet"],
        ["out"],
    ),
    "memory": Command(
        ["diagnose", "memory", MODEL, *TEXT, "--positions", "16,64"]
        + ["--output", "{out}", "--quiet"],
        ["out"],
    ),
    "states": Command(
        ["diagnose", "states", "{shelf}/mamba2", *TEXT, "--train-length", "64", "--length", "1k"]
        + ["--output", "{out}", "--quiet"],
        ["out/states.jsonl", "out/diagnosis.yaml"],
    ),
    "gradients": Command(
        ["diagnose", "gradients", MODEL, *TEXT, "--lengths", "16,32", "--output", "{out}"]
        + ["--quiet"],
        ["out/gradients.jsonl"],
    ),
    "compare": Command(
        ["compare", MODEL, "{shelf}/mamba2", "--suite", "{shelf}/suite.yaml", "--output", "{out}"]
        + ["--quiet"],
        ["out"],
    ),
    "calibrate": Command(
        [
            "calibrate",
            "{shelf}/mamba2",
            *TEXT,
            "--method",
            "scale_decay(steps=4,windows=2)",
            "--quiet",
        ]
        + ["--train-length", "32", "--target-length", "128", "--output", "{out}/c.yaml"],
        ["out/c.yaml"],
    ),
    "convert": Command(["convert", "{shelf}/mamba2", "{out}", "--to", "hf"], ["out"]),
    "data": Command(["data", "build", "--out", "{out}", "--quiet", "{shelf}/text.txt"], ["out"]),
    "harness": Command(
        ["eval", "harness", MODEL, "--tasks", "longrnn_passkey", "--limit", "6", "--metadata"]
        + ['{{"max_seq_lengths": [256], "n": 6}}', "--use_cache", "{out}/cache", "--quiet"],
        [],
    ),
}


@pytest.fixture(scope="module")
def shelf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Models, configurations and texts for the commands."""
    from longrnn.config import build_config
    from longrnn.models import RecurrentConfig, RecurrentLM
    from longrnn.models.checkpoint import save_model
    from tests.training.runs import LSTM, MAMBA2

    folder = tmp_path_factory.mktemp("shelf")
    torch.manual_seed(0)
    save_model(RecurrentLM(build_config(RecurrentConfig, LSTM)), folder / "model")
    save_model(RecurrentLM(build_config(RecurrentConfig, MAMBA2)), folder / "mamba2")
    rng = random.Random(0)
    words = [f"{rng.choice('bdklmnprst')}{rng.choice('aeiou')}" for _ in range(3000)]
    (folder / "text.txt").write_text(" ".join(words))
    long = {"max_steps": 60, "save_steps": 5, "logging_steps": 5, "length": {"max": 6}}
    write_config(tiny("reverse", Path("out"), **long), folder / "train.yaml")
    write_config(tiny("reverse", Path("out"), max_steps=20), folder / "short.yaml")
    (folder / "suite.yaml").write_text(
        "evaluations: [{kind: passkey, lengths: [180, 240], depths: [0, 1], n: 4}]"
    )
    return folder


def start(command: Command, shelf: Path, folder: Path, *, again: bool) -> Fork:
    begun = again and command.again and (folder / "out/train.yaml").is_file()
    chosen = command.again if begun else command.arguments
    arguments = [one.format(shelf=shelf, out=folder / "out") for one in chosen]
    return Fork(*arguments, folder=folder.parent / "log")


def assert_whole(folder: Path) -> None:
    """No visible file is broken, except that the last row of results may be incomplete."""
    readers: Mapping[str, Callable[[Path], Any]] = {
        ".json": lambda path: json.loads(path.read_text()),
        ".jsonl": lambda path: [json.loads(line) for line in path.read_text().split("\n")[:-1]],
        ".yaml": lambda path: yaml.safe_load(path.read_text()),
        ".safetensors": lambda path: safe_open(path, "pt").keys(),
        ".pt": lambda path: torch.load(path, weights_only=True),
        ".html": lambda path: path.read_text().rstrip().endswith("</html>") or 1 / 0,
        ".png": lambda path: path.read_bytes().endswith(b"IEND\xaeB`\x82") or 1 / 0,
    }
    for path in folder.rglob("*"):
        hidden = any(part.startswith(".") for part in path.relative_to(folder).parts)
        if path.is_file() and not hidden and path.suffix in readers:
            try:
                readers[path.suffix](path)
            except Exception as error:
                raise AssertionError(f"{path} is broken after a kill: {error}") from error


def results(command: Command, folder: Path) -> dict[str, Any]:
    """Contents of the result files without times, rows sorted."""
    found: dict[str, Any] = {}
    for name in command.results:
        root = folder / name
        for path in [root] if root.is_file() else sorted(root.rglob("*")):
            # Checksums are of training.pt, whose pickled bytes differ where its content is equal.
            if not path.is_file() or path.suffix in (".png", ".html") or path.name == SUMS:
                continue
            if path.suffix == ".jsonl":
                rows = [json.loads(line) for line in path.read_text().splitlines()]
                plain = [json.dumps(without_clock(row), sort_keys=True) for row in rows]
                content: Any = sorted(plain)
            elif path.suffix == ".pt":
                content = str(torch.load(path, weights_only=True))
            else:
                content = path.read_bytes()
            found[str(path.relative_to(folder))] = content
    return found


def is_done(process: Fork, code: int) -> bool:
    """Whether a command ended, or found that the killed one had written everything."""
    return code == 0 or (code == 2 and "exists already" in process.err)


def without_clock(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: without_clock(v) for k, v in value.items() if k not in CLOCK}
    return [without_clock(v) for v in value] if isinstance(value, list) else value


@pytest.mark.parametrize(
    ("name", "count"),
    [
        *(pytest.param(name, KILLS, marks=pytest.mark.slow) for name in COMMANDS),
        # Kills of train, eval and data build in the default suite are beside their other tests.
        *(("grid", 1), ("finetune", 1)),
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
    wanted, printed = results(command, folder), whole.out
    assert wanted or printed
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
            assert_whole(folder)
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
        assert results(command, folder) == wanted
        assert_whole(folder)
