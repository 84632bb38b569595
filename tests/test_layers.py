"""Modules import only from their own or lower layers, and each heavy library in one place only."""

from __future__ import annotations

import subprocess
import sys

import pytest

import longrnn
from scripts.import_graph import (
    HOMES,
    REPOSITORY,
    ROOT,
    SEPARATE_PACKAGES,
    SOURCES,
    cycle,
    edges,
    file_edges,
    imports,
    layer,
    package_of,
    with_graph,
)


def violations(source: str, module: str, is_package: bool = False) -> list[str]:
    """Imports of a module that break the rules, one line each."""
    found = []
    for line, target in imports(source, module, is_package):
        library = target.split(".")[0]
        where = f"{module}:{line} imports {target}"
        if library == "longrnn":
            if layer(target) > layer(module):
                found.append(f"{where}, which is in a higher layer")
            packages = {package_of(module), package_of(target)}
            if len(packages) == 2 and packages <= SEPARATE_PACKAGES:
                found.append(f"{where}, a package of the same layer")
        elif library in HOMES:
            homes = HOMES[library]
            if not f"{module}.".startswith(tuple(f"{home}." for home in homes)):
                found.append(f"{where}, which only {', '.join(homes)} may")
    return found


@pytest.mark.parametrize("module", SOURCES)
def test_module(module: str) -> None:
    """A module imports only from its own layer or a lower one."""
    path = SOURCES[module]
    assert violations(path.read_text(), module, path.name == "__init__.py") == []


def test_nothing_imports_itself_in_a_cycle() -> None:
    """Neither packages of one layer, nor files of the lower ones."""
    assert cycle(edges()) == []
    assert cycle(file_edges()) == []
    assert cycle({"a": {"b"}, "b": {"c"}, "c": {"a"}}) == ["a", "b", "c", "a"]


def test_the_graph_in_contributing_is_the_code() -> None:
    """CONTRIBUTING.md draws the imports as they are: `python scripts/import_graph.py --write`."""
    text = (REPOSITORY / "CONTRIBUTING.md").read_text()
    assert with_graph(text) == text


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("longrnn.state", "import longrnn.ops.norm"),
        ("longrnn.state", "from longrnn import ops"),
        ("longrnn.state", "from .ops.norm import rms_norm"),
        ("longrnn.ops.norm", "def f():\n    from longrnn.models import generate"),
        ("longrnn.ops.norm", "try:\n    import longrnn.hf\nexcept ImportError:\n    pass"),
        ("longrnn.ops.norm", "from longrnn import RecurrentLM"),
        ("longrnn.ops.norm", "from importlib import import_module\nimport_module('longrnn.cli')"),
        ("longrnn.cells.recurrent", "from longrnn.data import TASKS"),
        ("longrnn.data.sequences", "from longrnn.cells import Cell"),
        ("longrnn.models.base", "if TYPE_CHECKING:\n    pass\nelse:\n    import longrnn.hf"),
        ("longrnn.models.base", "import transformers"),
    ],
)
def test_the_checker_finds(module: str, source: str) -> None:
    """Each source breaks exactly one rule."""
    assert len(violations(source, module)) == 1


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("longrnn.ops.norm", "from longrnn.errors import UserError"),
        ("longrnn.ops.norm", "from longrnn import state, __version__"),
        ("longrnn.cells.recurrent", "from longrnn.cells import Cell\nfrom .base import MIXERS"),
        ("longrnn.ops.norm", "if TYPE_CHECKING:\n    from longrnn.hf import load"),
        ("longrnn.training.trainer", "from longrnn.evaluation import passkey\nimport accelerate"),
        ("longrnn.hf.load", "import transformers_extra, torch"),
    ],
)
def test_the_checker_allows(module: str, source: str) -> None:
    """Imports from lower layers, within a layer, for types alone, and in the home of a library."""
    assert violations(source, module) == []


def test_a_new_package_needs_a_layer() -> None:
    """A package that no layer lists is refused."""
    with pytest.raises(AssertionError, match="give longrnn/attic/ a layer"):
        violations("import longrnn.attic.old", "longrnn.ops.norm")


def test_import_is_light() -> None:
    """`import longrnn` imports no library, and lists its names."""
    script = (
        "import sys, longrnn\n"
        "assert 'RecurrentLM' in dir(longrnn) and longrnn.__version__\n"
        "heavy = {'torch', 'numpy', 'pydantic', 'transformers', 'accelerate', 'matplotlib'}\n"
        "print(*sorted(heavy & sys.modules.keys()))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT.parent, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == ""


def test_unknown_public_name() -> None:
    """A missing attribute raises AttributeError, so that `hasattr` works."""
    with pytest.raises(AttributeError, match="no attribute 'Transformer'"):
        longrnn.Transformer  # noqa: B018
