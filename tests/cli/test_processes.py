"""What needs a process of its own: imports, and a kill in the middle of an evaluation."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from longrnn.results import read_rows
from tests.training.forks import run
from tests.training.runs import signal_after, start

HEAVY = {"torch", "transformers", "accelerate", "matplotlib", "scipy", "numpy", "omegaconf"}


@pytest.mark.parametrize(
    "code",
    [
        "import longrnn; longrnn.__version__; dir(longrnn)",
        "import sys; sys.argv[1:] = ['--help']; from longrnn.cli import main; main()",
        "import sys; sys.argv[1:] = ['train', '--nonsense']; from longrnn.cli import main; main()",
    ],
    ids=["import", "help", "usage error"],
)
def test_what_shows_help_imports_nothing_heavy(code: str) -> None:
    """`--help` and usage errors import no heavy library."""
    program = (
        f"import atexit, sys; atexit.register(lambda: print('\\nMODULES', *sys.modules))\n{code}"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60
    )
    *_, last = done.stdout.splitlines()
    modules = last.split()
    assert modules[0] == "MODULES", done.stderr
    assert "longrnn" in modules
    assert not HEAVY & set(modules)


def test_a_killed_evaluation_goes_on(models: Path, tmp_path: Path) -> None:
    """An evaluation that was killed resumes from the last complete row."""
    output = tmp_path / "out"
    command = ["eval", "passkey", models / "text", "--lengths", "160,256", "--n", "40"]
    command += ["--batch-size", "2", "--output", output, "--quiet"]
    process = start(*command)
    signal_after(process, output / "rows.jsonl", signal.SIGKILL, lines=20)
    process.communicate()
    assert process.returncode == -signal.SIGKILL
    before = (output / "rows.jsonl").read_bytes()
    kept = before[: before.rindex(b"\n") + 1]
    assert len(kept.splitlines()) < 400
    done = run(*command)
    assert done.returncode == 0, done.stderr
    assert (output / "rows.jsonl").read_bytes().startswith(kept)
    rows, damaged = read_rows(output / "rows.jsonl")
    assert damaged == {}
    cells = Counter(tuple(row["item"].values()) for row in rows)
    assert len(cells) == 2 * 5 * 40
    assert set(cells.values()) == {1}
    assert {path.name for path in output.iterdir()} >= {"report.html", "cells.json", "rows.jsonl"}
