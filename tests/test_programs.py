"""Programs: how they end, the number of their threads, and what their children import."""

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import typer

import longrnn
from longrnn.cli.command import invoke
from longrnn.errors import Terminated, UserError
from longrnn.programs import describe, module_command, module_environment, run_to_end
from longrnn.threads import limit_threads, usable_cores
from tests.training.runs import ENVIRONMENT

pytestmark = pytest.mark.core


def test_a_child_imports_nothing_from_the_current_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It finds what this process finds, and PYTHONPATH; a `yaml.py` beside texts is not run."""
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/mine.py").write_text("import longrnn, yaml\nprint(longrnn.__file__)")
    (tmp_path / "yaml.py").write_text("raise SystemExit(99)")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "mine"))
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "1")  # of a launch, to which a child does not belong
    command, environment = module_command("mine"), module_environment()
    assert "TORCHELASTIC_RUN_ID" not in environment
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.stdout.strip() == longrnn.__file__, done.stderr


AGAIN = "longrnn train c.yaml"


@pytest.mark.parametrize(
    ("error", "code", "says"),
    [
        (UserError("n is 0: give 1"), 2, ["n is 0: give 1"]),
        (KeyboardInterrupt(), 130, ["interrupted; what was finished is kept", AGAIN]),
        (ZeroDivisionError("division by zero"), 1, ["unexpected ZeroDivisionError (division by"]),
        (ValueError("xxx " * 5000), 1, ["unexpected ValueError (xxx", "xxx …)"]),
        (AssertionError(), 1, ["unexpected AssertionError; run again with LONGRNN_DEBUG=1"]),
        (OSError(errno.ENOSPC, "No space left on device", "a/b"), 2, ["a/b can", "space", AGAIN]),
        (OSError("Can't load the tokenizer"), 1, ["unexpected OSError (Can't load the tokenizer)"]),
        (MemoryError(), 2, ["not enough memory: use a smaller batch size"]),
        (
            torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.50 GiB. GPU 0 has"),
            2,
            ["not enough memory for 20.5 GiB: use a smaller batch size"],
        ),
        (
            RuntimeError("[enforce fail] can't allocate memory: you tried to allocate 2000 bytes."),
            2,
            ["not enough memory for 2,000 bytes: use"],
        ),
        (RuntimeError("Storage size calculation overflowed with sizes=[9]"), 2, ["memory: use a"]),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else "",
)
def test_every_error_is_one_sentence(
    error: BaseException,
    code: int,
    says: list[str],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The same sentence and code from a typer app, of which typer sees the error first."""
    monkeypatch.delenv("LONGRNN_DEBUG", raising=False)

    def fail() -> None:
        raise error

    app = typer.Typer(pretty_exceptions_enable=False)
    app.command()(fail)
    with pytest.raises(SystemExit) as leaving:
        run_to_end(lambda: invoke(app, []), again=lambda: AGAIN)
    out, err = capsys.readouterr()
    assert leaving.value.code == code
    assert out == ""
    (line,) = err.splitlines()
    assert line == f"error: {describe(error, AGAIN)[0]}"
    for piece in says:
        assert piece in line


def test_a_termination_ends_with_code_0(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop() -> None:
        raise Terminated("step 3 is saved")

    for rank, said in (("0", "terminated; step 3 is saved; go on with: again\n"), ("1", "")):
        monkeypatch.setenv("RANK", rank)
        with pytest.raises(SystemExit) as leaving:
            run_to_end(stop, again=lambda: "again")
        assert not leaving.value.code
        assert capsys.readouterr() == (said, "")


def program(
    *arguments: str, stdout: int = subprocess.PIPE, environment: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments],
        stdout=stdout,
        stderr=subprocess.PIPE,
        text=True,
        env={**ENVIRONMENT, **(environment or {})},
        check=False,
    )


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_standard_output_that_cannot_be_written() -> None:
    """A full disk is reported; a reader that left, as in `longrnn … | head -1`, ends it quietly."""
    reading, writing = os.pipe()
    os.close(reading)
    full = os.open("/dev/full", os.O_WRONLY)
    script = "from longrnn.programs import run_to_end\nrun_to_end(lambda: print(1), again=str)"
    # The help is printed by rich, which exits with a code of its own.
    for words in ["-c", script], ["-m", "longrnn.cli", "eval", "--help"]:
        for stdout, code, says in ((full, 2, "No space left on device"), (writing, 141, "")):
            done = program(*words, stdout=stdout)
            assert done.returncode == code
            assert says in done.stderr
            assert len(done.stderr.splitlines()) == len([says] if says else [])
    os.close(full)
    os.close(writing)


PLAIN = "2 \\xd7 3 \\u2013 \\udcff\n"
SPECIAL = "print('2 \\u00d7 3 \\u2013 \\udcff')"
# A test suite that runs in the background has Ctrl-C ignored.
CTRL_C = (
    "signal.signal(signal.SIGINT, signal.default_int_handler)"
    " and os.kill(os.getpid(), signal.SIGINT) or time.sleep(30)"
)


@pytest.mark.parametrize(
    ("script", "environment", "code", "out"),
    [
        (SPECIAL, {"PYTHONIOENCODING": "ascii"}, 0, PLAIN),
        (SPECIAL, {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}, 0, PLAIN),
        # A process of a launch leaves without Python's exit.
        ("print('first') or 1 / 0", {"WORLD_SIZE": "2", "RANK": "1"}, 1, "first\n"),
        (CTRL_C, {}, 130, ""),
    ],
    ids=["PYTHONIOENCODING", "LC_ALL", "launched", "Ctrl-C"],
)
def test_a_script_ends(script: str, environment: dict[str, str], code: int, out: str) -> None:
    """All output is there, with escapes for what the encoding lacks, and an error is one line."""
    text = "import os, signal, time\nfrom longrnn.programs import run_to_end\n"
    text += f"run_to_end(lambda: {script}, again=lambda: 'again')"
    done = program("-c", text, environment=environment)
    assert (done.returncode, done.stdout) == (code, out), done.stderr
    assert [line[:7] for line in done.stderr.splitlines()] == ["error: "] * (code != 0)


CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()


@pytest.mark.parametrize(
    ("quota", "expected"),
    [
        (None, CORES),
        ("max 100000\n", CORES),
        ("50000 100000\n", 1),
        ("110000 100000\n", min(CORES or 1, 2)),
        ("640000000 100000\n", CORES),
        ("nonsense", CORES),
    ],
)
def test_a_cpu_quota_limits_the_usable_cores(
    quota: str | None, expected: int, tmp_path: Path
) -> None:
    """Without a quota, and where it cannot be read, all cores are usable."""
    if quota is not None:
        (tmp_path / "cpu.max").write_text(quota)
    assert usable_cores(tmp_path / "cpu.max") == expected


def test_a_number_that_the_user_chose_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads are limited to the usable cores of a machine that has more."""
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    chosen, free, whole = {"OMP_NUM_THREADS": "3"}, {}, {}
    limit_threads(chosen, 2)
    limit_threads(free, 2)
    limit_threads(whole, 8)
    assert (chosen, free, whole) == ({"OMP_NUM_THREADS": "3"}, {"OMP_NUM_THREADS": "2"}, {})
