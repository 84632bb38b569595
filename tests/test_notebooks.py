"""The tutorials of the documentation run from the first cell to the last."""

from __future__ import annotations

from pathlib import Path

import pytest

NOTEBOOKS = sorted((Path(__file__).parent.parent / "docs" / "tutorials").glob("*.ipynb"))


def test_there_are_notebooks() -> None:
    """The parametrisation below found the tutorials."""
    assert "state_is_a_value" in {path.stem for path in NOTEBOOKS}


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_runs(path: Path, tmp_path: Path) -> None:
    """Every cell runs, and its printed text is that of the notebook in the documentation."""
    nbclient = pytest.importorskip("nbclient")
    import nbformat

    recorded = nbformat.read(path, as_version=4)
    run = nbformat.read(path, as_version=4)
    nbclient.NotebookClient(
        run, timeout=600, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}}
    ).execute()
    for before, after in zip(recorded.cells, run.cells, strict=True):
        if "tags" in before.metadata and "timing" in before.metadata.tags:
            continue
        assert printed(after) == printed(before)


def printed(cell: dict) -> list[str]:
    """The text that a cell prints."""
    return [o["text"] for o in cell.get("outputs", []) if o.get("output_type") == "stream"]
