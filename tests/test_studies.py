"""Every study runs from beginning to end at a size that is too small for results."""

import os
import runpy
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from longrnn import load
from scripts import studies
from tests.cli.conftest import Outcome, table
from tests.texts import DATA

ROOT = Path(__file__).parent.parent
SHORTHANDS = {
    "BOOKS": "--train a.txt --text b.txt",
    "REVERSE": "--steps 2 --seeds 1 --width 16 --vocab-sizes",
}
# Scripts, those that take longest as slow, and options that make them short.
SMOKE = table((DATA / "studies.txt").read_text(), SHORTHANDS)


@pytest.fixture
def study(
    books: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., Outcome]:
    """Runs a script beside the books, in this process."""
    monkeypatch.chdir(books)
    monkeypatch.syspath_prepend(ROOT / "scripts")

    def call(script: str, *arguments: str) -> Outcome:
        name, *part = script.split()
        monkeypatch.setattr(sys, "argv", [name, *part, *arguments])
        with pytest.raises(SystemExit) as leaving:
            runpy.run_path(str(ROOT / "scripts" / name), run_name="__main__")
        said = capsys.readouterr()
        return Outcome(int(leaving.value.code or 0), str(said.out), str(said.err))

    return call


@pytest.fixture
def books(tmp_path: Path) -> Path:
    for name, repeats in (("a", 60), ("b", 61), ("c", 62), ("long", 400)):
        text = f"It was {name} dark and stormy night; the rain fell.\n"
        (tmp_path / f"{name}.txt").write_text(text * repeats)
    return tmp_path


@pytest.mark.parametrize(
    ("script", "options"),
    [
        pytest.param(
            script.removesuffix(" (slow)"),
            options,
            marks=[pytest.mark.slow] * script.endswith("(slow)"),
            id=script,
        )
        for script, (options,) in SMOKE
    ],
)
def test_a_study(script: str, options: str, books: Path, study: Callable[..., Outcome]) -> None:
    """It writes its tables and its verdict, and a second run trains nothing and finds the same."""
    if "--rows" in options:
        pytest.importorskip("rapidfuzz")
    command = [*options.split(), "--output", "out"]
    done = study(script, *command)
    assert done.code == 0, done.err
    (report,) = books.glob("out/**/report.md")
    assert report.read_text() == done.out
    assert "**Verdict.**" in done.out
    weights = {path: path.stat().st_mtime_ns for path in books.rglob("*.safetensors")}
    if script.endswith((" forget", " vocabularies", "transformer.py recall")):
        assert study(script, *command).out == done.out
    assert {path: path.stat().st_mtime_ns for path in weights} == weights


@pytest.mark.parametrize("trained", ["lora", "all"])
def test_weights_are_trained_as_a_fit_is(
    trained: str, books: Path, study: Callable[..., Outcome]
) -> None:
    """One step of `study_fit.py` writes a checkpoint whose logits differ from those before."""
    how = f"--text a.txt --steps 1 --keys 1 --length 256 --rate 0.1 --trained {trained}"
    command = ["study_fit.py", "collapse-tiny", *how.split(), "--output", "out"]
    done = study(*command)
    assert done.code == 0, done.err
    tokens = torch.arange(16)[None]
    before, after = (load(name)(tokens).logits for name in ("collapse-tiny", books / "out"))
    assert after.isfinite().all()
    assert not torch.equal(before, after)
    assert study(*command).code == 2  # the folder exists


def test_an_unfinished_run_is_resumed(tmp_path: Path) -> None:
    config = {"model": {"d_model": 8, "n_layers": 1, "mixer": {"kind": "rnn"}},
              "task": {"kind": "copy"}, "max_steps": 2, "save_steps": 1}  # fmt: skip
    run = studies.train(config, tmp_path / "run", {"length.max": 16})
    finished, first = run / "model.safetensors", run / "checkpoint-00000001"
    weights, written = finished.read_bytes(), first.stat().st_mtime_ns
    finished.unlink()
    shutil.rmtree(run / "checkpoint-00000002")
    studies.train(config, run, {"length.max": 16})
    assert finished.read_bytes() == weights
    assert first.stat().st_mtime_ns == written


@pytest.mark.parametrize(
    ("script", "options", "says"),
    [
        ("study_initial_states.py", ["--train", "no.txt", "--text", "b.txt"], "no.txt"),
        ("study_capacity.py forget", ["--train-lengths", "100"], "step"),
        ("study_expressivity.py recall", ["--task", "S3"], "'S3'"),
        ("study_fit.py", ["collapse-tiny", "--trained=all", "--rate=1", "--text=no.txt"], "no.txt"),
        ("demo.py", ["--lengths", "x"], "'x'"),
    ],
)
def test_bad_input_of_a_study(
    script: str, options: list[str], says: str, books: Path, study: Callable[..., Outcome]
) -> None:
    before = list(books.iterdir())
    done = study(script, *options)
    assert (done.code, done.out) == (2, "")
    assert done.err.startswith("error: ")
    assert says in done.err
    assert list(books.iterdir()) == before


def test_a_script_is_a_program_of_its_own(tmp_path: Path) -> None:
    """It finds its modules from any folder."""
    command = [sys.executable, str(ROOT / "scripts/study_char_lm.py"), "--help"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert (done.returncode, "--setting" in done.stdout) == (0, True), done.stderr
