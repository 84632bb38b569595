"""Imports point downwards, and each heavy library has one home."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import longrnn

ROOT = Path(longrnn.__file__).parent

# A top-level module (longrnn/state.py) is in layer 0. The package itself re-exports from every
# layer, so that importing from it means importing from the top.
LAYERS = {
    "ops": 1,
    "mixers": 2,
    "positions": 2,
    "tasks": 2,
    "models": 3,
    "mitigations": 3,
    "inference": 4,
    "hf": 4,
    "training": 5,
    "evaluation": 5,
    "comparison": 6,
    "sweep": 6,
    "studies": 6,
    "diagnostics": 6,
    "cli": 7,
}
TOP = 7
# Packages of one layer that do not import each other.
STRANGERS = {"mixers", "positions", "tasks"}
HOMES = {
    "transformers": "longrnn.hf",
    "accelerate": "longrnn.training",
    "datasets": "longrnn.training.documents",
    "triton": "longrnn.ops.ssd",
    "mamba_ssm": "longrnn.ops.ssd",
    "lm_eval": "longrnn.evaluation.harness",
    "matplotlib": "longrnn.diagnostics",
    "jinja2": "longrnn.diagnostics",
}


def name_of(path: Path) -> str:
    parts = path.relative_to(ROOT.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


SOURCES = {
    name_of(path): path for path in sorted(ROOT.rglob("*.py")) if path != ROOT / "__init__.py"
}


def family(module: str) -> str:
    """`mixers` of `longrnn.mixers.lstm`, nothing of `longrnn`."""
    return ".".join(module.split(".")[1:2])


def layer(module: str) -> int:
    """Layer of a module of the package.

    Raises:
        AssertionError: a package that has no layer yet.
    """
    if module == "longrnn":
        return TOP
    if family(module) in LAYERS:
        return LAYERS[family(module)]
    is_module = module == "longrnn.__version__" or (ROOT / f"{family(module)}.py").is_file()
    assert is_module, f"{module}: give longrnn/{family(module)}/ a layer in {Path(__file__).name}"
    return 0


def is_type_checking(node: ast.stmt) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test).split(".")[-1] == "TYPE_CHECKING"


def statements(tree: ast.AST) -> Iterator[ast.AST]:
    """Every node, also inside functions, but not under `if TYPE_CHECKING`."""
    for child in ast.iter_child_nodes(tree):
        if isinstance(child, ast.stmt) and is_type_checking(child):
            assert isinstance(child, ast.If)
            for other in child.orelse:
                yield other
                yield from statements(other)
        else:
            yield child
            yield from statements(child)


def imports(source: str, module: str, is_package: bool) -> Iterator[tuple[int, str]]:
    """(line, dotted name) of everything that a module imports."""
    for node in statements(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            origin = node.module or ""
            if node.level:
                parts = module.split(".")
                parts = parts[: len(parts) - node.level + is_package]
                origin = ".".join([*parts, *([origin] if origin else [])])
            names = [alias.name for alias in node.names]
            if origin != "longrnn":
                yield node.lineno, origin
                continue
            for name in names:
                inside = name == "__version__" or name in LAYERS or f"longrnn.{name}" in SOURCES
                yield node.lineno, f"longrnn.{name}" if inside else "longrnn"
        elif isinstance(node, ast.Call) and node.args:
            called = ast.unparse(node.func).split(".")[-1]
            name = node.args[0]
            if called in ("import_module", "__import__") and isinstance(name, ast.Constant):
                yield node.lineno, str(name.value)


def violations(source: str, module: str, is_package: bool = False) -> list[str]:
    """What a module imports against the rules, one line each."""
    found = []
    for line, target in imports(source, module, is_package):
        library = target.split(".")[0]
        where = f"{module}:{line} imports {target}"
        if library == "longrnn":
            if layer(target) > layer(module):
                found.append(f"{where}, which is in a higher layer")
            families = {family(module), family(target)}
            if len(families) == 2 and families <= STRANGERS:
                found.append(f"{where}, a package of the same layer")
        elif library in HOMES:
            home = HOMES[library]
            if module != home and not module.startswith(f"{home}."):
                found.append(f"{where}, whose home is {home}")
    return found


@pytest.mark.parametrize("module", SOURCES)
def test_module(module: str) -> None:
    """A module imports only from its own layer or a lower one."""
    path = SOURCES[module]
    assert violations(path.read_text(), module, path.name == "__init__.py") == []


def test_there_are_modules() -> None:
    """The parametrisation above found the package."""
    assert {"longrnn.state", "longrnn.ops.ssd", "longrnn.models.recurrent"} <= SOURCES.keys()


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("longrnn.state", "import longrnn.ops.norm"),
        ("longrnn.state", "from longrnn.ops import norm"),
        ("longrnn.state", "from longrnn import ops"),
        ("longrnn.state", "from .ops.norm import rms_norm"),
        ("longrnn.state", "from . import ops"),
        ("longrnn.ops.norm", "from ..mixers import MIXERS"),
        ("longrnn.ops.norm", "def f():\n    from longrnn.models import generate"),
        ("longrnn.ops.norm", "try:\n    import longrnn.hf\nexcept ImportError:\n    pass"),
        ("longrnn.ops.norm", "import longrnn"),
        ("longrnn.ops.norm", "from longrnn import RecurrentLM"),
        ("longrnn.ops.norm", "from importlib import import_module\nimport_module('longrnn.cli')"),
        ("longrnn.mixers.gru", "from longrnn.positions import POSITIONS"),
        ("longrnn.tasks.transductions", "from longrnn.mixers.base import Mixer"),
        ("longrnn.models.base", "if TYPE_CHECKING:\n    pass\nelse:\n    import longrnn.hf"),
        ("longrnn.hf.loading", "from longrnn.training import optim"),
        ("longrnn.models.base", "import transformers"),
        ("longrnn.training.data", "from transformers import AutoModel"),
        ("longrnn.evaluation.passkey", "import accelerate.utils"),
        ("longrnn.training.data", "from datasets import load_dataset"),
        ("longrnn.mixers.mamba2", "import triton.language as tl"),
        ("longrnn.hf.loading", "from mamba_ssm import Mamba2"),
        ("longrnn.evaluation.passkey", "import lm_eval"),
        ("longrnn.comparison.compare", "from matplotlib import pyplot"),
    ],
)
def test_the_checker_finds(module: str, source: str) -> None:
    """Each made-up source breaks one rule."""
    assert len(violations(source, module)) == 1


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("longrnn.ops.norm", "from longrnn.errors import UserError"),
        ("longrnn.ops.norm", "from longrnn import state, __version__"),
        ("longrnn.mixers.gru", "from longrnn.mixers.base import Mixer\nfrom .base import MIXERS"),
        ("longrnn.cli.train", "import longrnn\nfrom longrnn import load"),
        ("longrnn.ops.norm", "if TYPE_CHECKING:\n    from longrnn.hf import loading"),
        ("longrnn.ops.norm", "import typing\nif typing.TYPE_CHECKING:\n    import transformers"),
        ("longrnn.training.trainer", "from longrnn.evaluation import passkey\nimport accelerate"),
        ("longrnn.evaluation.harness", "import lm_eval.api"),
        ("longrnn.ops.ssd.fused", "import triton"),
        ("longrnn.hf.loading", "import transformers_extra, torch"),
    ],
)
def test_the_checker_allows(module: str, source: str) -> None:
    """Downwards, sideways within a layer, for types alone, and a library at home."""
    assert violations(source, module) == []


def test_a_new_package_needs_a_layer() -> None:
    """A package that no layer lists is refused."""
    with pytest.raises(AssertionError, match="give longrnn/attic/ a layer"):
        violations("import longrnn.attic.old", "longrnn.ops.norm")


def test_import_is_light() -> None:
    """`import longrnn` loads no library, and still knows its names."""
    script = (
        "import sys, longrnn\n"
        "assert 'RecurrentLM' in dir(longrnn) and longrnn.__version__\n"
        "heavy = {'torch', 'numpy', 'omegaconf', 'transformers', 'accelerate', 'matplotlib'}\n"
        "print(*sorted(heavy & sys.modules.keys()))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT.parent, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == ""


def test_unknown_public_name() -> None:
    """A missing attribute is an AttributeError, so that `hasattr` works."""
    with pytest.raises(AttributeError, match="no attribute 'Transformer'"):
        longrnn.Transformer  # noqa: B018
