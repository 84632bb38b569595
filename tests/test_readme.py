"""What the README shows works as printed: example, commands, public names; tutorials run."""

import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest

import longrnn
from longrnn.programs import module_command, module_environment

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```", README, re.DOTALL | re.MULTILINE)
COMMANDS = [
    line
    for kind, block in BLOCKS
    for line in block.splitlines()
    if not kind and line.startswith("longrnn ")
]


@pytest.mark.parametrize("share", [0.1, pytest.param(1, marks=pytest.mark.slow)])
def test_the_python_example_recalls_its_key(
    share: float, capsys: pytest.CaptureFixture[str]
) -> None:
    (block,) = [block for kind, block in BLOCKS if kind == "python"]
    block = re.sub(r"(\d+)(?= \+|  #)", lambda found: f"{int(share * int(found[1]))}", block)
    exec(compile(block, "README.md", "exec"), {})
    first, second = capsys.readouterr().out.splitlines()
    position = int(first.split()[0])
    assert position > share * 100_000
    assert "40913" in first
    assert second.split()[0] == first.split()[0], "both questions must start from the same state"


@pytest.mark.slow
def test_the_commands_run(tmp_path: Path) -> None:
    (tmp_path / "eval").symlink_to(ROOT / "eval")
    assert len(COMMANDS) > 5
    for command in COMMANDS:
        words = shlex.split(command, comments=True)[1:]
        done = subprocess.run(
            module_command("longrnn.cli", *words),
            cwd=tmp_path,
            env=module_environment(),
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, f"{command}: {done.stderr}"


@pytest.mark.parametrize("name", longrnn.__all__)
def test_every_public_name_resolves(name: str) -> None:
    assert getattr(longrnn, name) is not None


NOTEBOOKS = sorted((ROOT / "docs/tutorials").glob("*.ipynb"))


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_runs(path: Path, tmp_path: Path) -> None:
    import nbformat
    from nbclient import NotebookClient

    recorded = nbformat.read(path, as_version=4)
    run = nbformat.read(path, as_version=4)
    where = {"metadata": {"path": str(tmp_path)}}
    NotebookClient(run, timeout=600, kernel_name="python3", resources=where).execute()
    for before, after in zip(recorded.cells, run.cells, strict=True):
        assert len(printed(after).splitlines()) == len(printed(before).splitlines())


def printed(cell: Any) -> str:
    """The text that a cell prints."""
    outputs = cell.get("outputs", [])
    return "".join(out["text"] for out in outputs if out.get("output_type") == "stream")
