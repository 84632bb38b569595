"""What needs a process of its own: what is imported for help."""

from __future__ import annotations

import subprocess
import sys

import pytest

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
