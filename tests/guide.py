"""The examples of CONTRIBUTING.md, as files of a user that `--import` names."""

import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from longrnn.imports import IMPORTED
from longrnn.registry import Registry

GUIDE = Path(__file__).parents[1] / "CONTRIBUTING.md"
# The sections with the examples, each in a file of its own.
SECTIONS = {
    "cell": "Add a cell",
    "scan": "Add a cell",
    "encoding": "Add a position encoding",
    "mitigation": "Add a mitigation",
    "evaluation": "Add an evaluation",
    "task": "Add a task",
}


def write_examples(folder: Path) -> None:
    """Writes `my_cell.py`, `my_scan.py`, … into a folder."""
    names = list(SECTIONS)
    for name, section in SECTIONS.items():
        text = GUIDE.read_text().split(f"## {section}\n")[1].split("\n## ")[0]
        blocks = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
        of_section = [other for other in names if SECTIONS[other] == section]
        assert len(blocks) == len(of_section)
        (folder / f"my_{name}.py").write_text(blocks[of_section.index(name)])


@contextmanager
def forgotten() -> Iterator[None]:
    """Takes back what is imported and registered inside, as the end of a process does."""
    modules, path, imported = set(sys.modules), [*sys.path], dict(IMPORTED)
    try:
        yield
    finally:
        sys.path[:] = path
        IMPORTED.clear()
        IMPORTED.update(imported)
        own = {name for name in sys.modules.keys() - modules if name.startswith("my_")}
        for registry in Registry.every:
            for name, member in [*registry.items()]:
                if member.__module__ in own:
                    del registry[name]
        for name in own:
            del sys.modules[name]
