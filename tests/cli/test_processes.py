"""What needs a process of its own: what is imported for a command."""

import subprocess
import sys

import pytest

from longrnn.checkpoints.names import embedded
from longrnn.cli.options import pick_device

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
    assert not HEAVY & modules_of(code)


def test_small_checkpoints_are_loaded_without_the_compiler_of_torch() -> None:
    """Its import takes longer than everything else that `longrnn info` does."""
    code = f"""
import contextlib, sys
from longrnn.cli import main
for name in {list(embedded())}:
    sys.argv[1:] = ["info", name]
    with contextlib.suppress(SystemExit):
        main()
"""
    heavy = {"torch._dynamo", "sympy", "scipy", "matplotlib", "rich", "transformers"}
    assert not heavy & modules_of(code)


@pytest.mark.parametrize("terminal", [True, False])
def test_missing_kernels_are_reported_on_a_terminal(
    terminal: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("longrnn.ops.cpu.missing", lambda: "run `pip install -e .`")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal)
    pick_device("cpu")
    assert ("`pip install -e .`" in capsys.readouterr().err) == terminal


def modules_of(code: str) -> set[str]:
    """Return the modules that a program imports."""
    program = (
        f"import atexit, sys; atexit.register(lambda: print('\\nMODULES', *sys.modules))\n{code}"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60
    )
    *_, last = done.stdout.splitlines()
    first, *modules = last.split()
    assert first == "MODULES", done.stderr
    assert "longrnn" in modules
    return {*modules}
