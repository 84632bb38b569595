"""Modules import only from their own or lower layers, and each heavy library in one place only."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from graphlib import TopologicalSorter
from pathlib import Path

import longrnn

ROOT = Path(longrnn.__file__).parent
# Modules such as longrnn/state.py are in layer 0. The package itself exports names of every layer,
# so an import of one of them from `longrnn` counts as an import from the top layer.
LAYERS = {
    "ops": 1,
    "reporting": 1,
    "cells": 2,
    "data": 2,
    "models": 3,
    "mitigations": 3,
    "inference": 4,
    "hf": 4,
    "checkpoints": 5,
    "hf.auto": 6,
    "training": 6,
    "evaluation": 6,
    "diagnostics": 7,
    "cli": 8,
}
TOP = 8
# Packages of one layer that may not import each other.
SEPARATE_PACKAGES = {"cells", "data"}
# The only packages and modules that may import a library.
HOMES = {
    "transformers": ("longrnn.hf", "longrnn.checkpoints"),
    "accelerate": ("longrnn.training",),
    "peft": ("longrnn.checkpoints.adapters",),
    "datasets": ("longrnn.data.sources", "longrnn.evaluation.harness.local_data"),
    "mamba_ssm": ("longrnn.ops",),
    "fla": ("longrnn.ops",),
    "lm_eval": ("longrnn.evaluation.harness",),
    "matplotlib": ("longrnn.reporting.figures",),
    "jinja2": ("longrnn.reporting.pages",),
}


def name_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT.parent).with_suffix("").parts).removesuffix(".__init__")


SOURCES = {name_of(path): path.read_text() for path in ROOT.rglob("*.py")}
del SOURCES["longrnn"]
PUBLIC = {*longrnn.__all__} - {"__version__"}


class Imports(ast.NodeVisitor):
    """Collects what a module imports, inside functions too, but not for types alone."""

    def __init__(self, source: str) -> None:
        self.found: list[str] = []
        self.visit(ast.parse(source))

    def visit_Import(self, node: ast.Import) -> None:
        self.found += [alias.name for alias in node.names]

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        assert node.level == 0, "imports are absolute"
        self.found += [f"{node.module}.{alias.name}" for alias in node.names]

    def visit_If(self, node: ast.If) -> None:
        for child in (
            node.orelse if "TYPE_CHECKING" in ast.unparse(node.test) else [*node.body, *node.orelse]
        ):
            self.visit(child)


def package_of(name: str) -> str:
    """The package of a module, or the sub-package that is a layer of its own."""
    inner = ".".join(name.split(".")[1:3])
    return inner if inner in LAYERS else inner.partition(".")[0]


def layer(name: str) -> int:
    package = package_of(name)
    return TOP if package in PUBLIC else LAYERS.get(package, 0)


def violations(source: str, module: str) -> list[str]:
    """Imports of a module that break the rules."""
    found = []
    for target in Imports(source).found:
        library = target.partition(".")[0]
        if library == "longrnn":
            packages = {package_of(module), package_of(target)}
            if layer(target) > layer(module) or packages == SEPARATE_PACKAGES:
                found.append(f"{module} imports {target} of a higher or a separate layer")
        elif not f"{module}.".startswith(tuple(f"{one}." for one in HOMES.get(library, [module]))):
            found.append(f"{module} imports {target}, which only {HOMES[library]} may")
    return found


def test_every_module_imports_from_its_own_or_lower_layers() -> None:
    packages = {path.name for path in ROOT.iterdir() if (path / "__init__.py").is_file()}
    assert packages == {name for name in LAYERS if "." not in name}
    assert [line for name, text in SOURCES.items() for line in violations(text, name)] == []


def test_no_packages_and_no_files_of_the_lower_layers_import_each_other() -> None:
    """A cycle is an error of the sorter, which names it."""
    packages: dict[str, set[str]] = {}
    files: dict[str, set[str]] = {}
    for module, text in SOURCES.items():
        for target in Imports(text).found:
            own, other = package_of(module), package_of(target)
            if own != other and {own, other} <= LAYERS.keys():
                packages.setdefault(own, set()).add(other)
            file = target if target in SOURCES else target.rpartition(".")[0]
            if file in SOURCES and layer(module) <= LAYERS["models"]:
                files.setdefault(module, set()).add(file)
    for graph in (packages, files):
        TopologicalSorter(graph).prepare()


def test_every_library_is_declared() -> None:
    project = tomllib.loads((ROOT.parent / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"].values()
    declared = [one for extra in (project["dependencies"], *extras) for one in extra]
    names = {re.split(r"[^\w-]", one)[0].replace("-", "_") for one in declared}
    names |= {"yaml", "fla", "mamba_ssm", "huggingface_hub", "tokenizers", "longrnn"}
    names |= {"pydantic_core", "cycler", "markupsafe"}  # of pydantic, matplotlib and jinja2
    names |= {"requests"}  # of datasets
    imported = {one.partition(".")[0] for text in SOURCES.values() for one in Imports(text).found}
    assert imported - names - set(sys.stdlib_module_names) == set()
