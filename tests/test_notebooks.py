"""The tutorials of the documentation run from the first cell to the last."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

NOTEBOOKS = sorted((Path(__file__).parent.parent / "docs" / "tutorials").glob("*.ipynb"))


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_runs(path: Path, tmp_path: Path) -> None:
    """Every cell runs, and prints as many lines as the notebook in the documentation shows."""
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
