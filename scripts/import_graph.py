"""Defines the layers of the packages of longrnn and computes the imports between them.

    python scripts/import_graph.py            # print the graph as Mermaid
    python scripts/import_graph.py --write    # write it into CONTRIBUTING.md

`tests/test_layers.py` checks the imports and that CONTRIBUTING.md is up to date.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
ROOT = REPOSITORY / "longrnn"

# Top-level modules such as longrnn/state.py are in layer 0. The package itself re-exports names of
# every layer, so an import from `longrnn` counts as an import from the top layer.
LAYERS = {
    "ops": 1,
    "cells": 2,
    "data": 2,
    "models": 3,
    "mitigations": 3,
    "inference": 4,
    "hf": 4,
    "training": 5,
    "evaluation": 5,
    "diagnostics": 6,
    "cli": 7,
}
TOP = 7
# Packages that may not import each other although they are in the same layer.
SEPARATE_PACKAGES = {"cells", "data"}
# The only packages and modules that may import a library.
HOMES = {
    "transformers": ("longrnn.hf",),
    "accelerate": ("longrnn.training",),
    "peft": ("longrnn.hf.lora",),
    "datasets": ("longrnn.data.sources",),
    "mamba_ssm": ("longrnn.ops.gpu",),
    "fla": ("longrnn.ops.gpu",),
    "lm_eval": ("longrnn.evaluation.harness",),
    "matplotlib": ("longrnn.evaluation.figures", "longrnn.diagnostics"),
    "jinja2": ("longrnn.evaluation.report",),
}


def name_of(path: Path) -> str:
    parts = path.relative_to(ROOT.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


SOURCES = {
    name_of(path): path for path in sorted(ROOT.rglob("*.py")) if path != ROOT / "__init__.py"
}


def package_of(module: str) -> str:
    """Returns the package of a module: `cells` for `longrnn.cells.recurrent`, "" for `longrnn`."""
    return ".".join(module.split(".")[1:2])


def layer(module: str) -> int:
    """Returns the layer of a module.

    Raises:
        AssertionError: the package of the module has no layer yet.
    """
    if module == "longrnn":
        return TOP
    if package_of(module) in LAYERS:
        return LAYERS[package_of(module)]
    is_module = module == "longrnn.__version__" or (ROOT / f"{package_of(module)}.py").is_file()
    assert is_module, (
        f"{module}: give longrnn/{package_of(module)}/ a layer in {Path(__file__).name}"
    )
    return 0


def is_type_checking(node: ast.stmt) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test).split(".")[-1] == "TYPE_CHECKING"


def statements(tree: ast.AST) -> Iterator[ast.AST]:
    """Yields every node of the tree, including function bodies, except under `if TYPE_CHECKING`."""
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
    """Yields (line, dotted name) of everything that a module imports."""
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
                modules = [one for name in names if (one := f"{origin}.{name}") in SOURCES]
                yield from ((node.lineno, one) for one in modules or [origin])
                continue
            for name in names:
                inside = name == "__version__" or name in LAYERS or f"longrnn.{name}" in SOURCES
                yield node.lineno, f"longrnn.{name}" if inside else "longrnn"
        elif isinstance(node, ast.Call) and node.args:
            called = ast.unparse(node.func).split(".")[-1]
            name = node.args[0]
            if called in ("import_module", "__import__") and isinstance(name, ast.Constant):
                yield node.lineno, str(name.value)


def edges() -> dict[str, set[str]]:
    """Returns the packages that each package imports, without layer 0."""
    found: dict[str, set[str]] = {package: set() for package in LAYERS}
    for module, path in SOURCES.items():
        if package_of(module) in LAYERS:
            for _, target in imports(path.read_text(), module, path.name == "__init__.py"):
                other = package_of(target)
                if (
                    target.startswith("longrnn.")
                    and other in LAYERS
                    and other != package_of(module)
                ):
                    found[package_of(module)].add(other)
    return found


def file_edges() -> dict[str, set[str]]:
    """Returns the files of the layers up to `models/` that each of them imports."""
    return {
        module: {
            target
            for _, target in imports(path.read_text(), module, path.name == "__init__.py")
            if target in SOURCES
        }
        for module, path in SOURCES.items()
        if layer(module) <= LAYERS["models"]
    }


def cycle(graph: dict[str, set[str]]) -> list[str]:
    """Returns the nodes along a cycle of the graph, or an empty list if there is no cycle."""
    try:
        TopologicalSorter({node: sorted(others) for node, others in graph.items()}).prepare()
    except CycleError as error:
        return error.args[1][::-1]
    return []


def mermaid() -> str:
    """Returns the graph as Mermaid, without edges that are implied by other edges."""
    graph = edges()
    lines = ["```mermaid", "graph TD"]
    for package in sorted(graph, key=lambda name: (-LAYERS[name], name)):
        for other in sorted(graph[package]):
            if not _reaches(graph, graph[package] - {other}, other):
                lines.append(f"  {package} --> {other}")
    return "\n".join([*lines, "```"])


def _reaches(graph: dict[str, set[str]], starts: set[str], goal: str) -> bool:
    return any(goal in graph[start] or _reaches(graph, graph[start], goal) for start in starts)


BEGIN, END = "<!-- import graph: python scripts/import_graph.py --write -->", "<!-- end -->"


def with_graph(text: str) -> str:
    """Returns the document with the current graph between its two markers."""
    before, rest = text.split(BEGIN, 1)
    return f"{before}{BEGIN}\n{mermaid()}\n{END}{rest.split(END, 1)[1]}"


if __name__ == "__main__":
    if sys.argv[1:] == ["--write"]:
        document = REPOSITORY / "CONTRIBUTING.md"
        document.write_text(with_graph(document.read_text()))
    else:
        print(mermaid())
