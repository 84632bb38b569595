"""The report of training runs, of real runs and of files that a killed process left."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from longrnn.reporting.training import summary, write_report
from longrnn.training.run import read_runs
from tests.diagnostics.conftest import open_alone
from tests.training.runs import tiny, train

pytestmark = pytest.mark.pictures


def made(folder: Path, rows: list[dict[str, Any]], torn: str = "") -> Path:
    """Return a run of which only the metrics are left."""
    folder.mkdir(parents=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows) + torn)
    return folder


def row(step: int, **values: float) -> dict[str, Any]:
    return {"step": step, "tokens": 10 * step, "loss": 1 / step, **values}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the report of two short runs, one with a name that contains markup."""
    root = tmp_path_factory.mktemp("training")
    train(tiny("reverse", root / "<b>one"))
    train(tiny("reverse", root / "two", learning_rate=1e-3))
    write_report(read_runs([root / "<b>one", root / "two"]), root / "report")
    return root / "report"


def test_in_a_browser(folder: Path, page: Any) -> None:
    """The report has all pictures, no script error and no external request."""
    open_alone(page, folder / "report.html", pictures=1)
    assert page.title() == "Training of <b>one, two"
    assert "two: loss " in page.inner_text(".summary")
    (runs,) = page.locator("table").all()
    assert runs.locator("tbody tr").count() == 2
    cells = runs.locator("tbody tr").nth(1).locator("td").all_inner_texts()
    assert cells[:2] == ["two", "10"]


def test_a_run_that_is_being_written(tmp_path: Path) -> None:
    """Metrics with a torn line, NaN, one row, or a late metric can be read."""
    rows = [row(1), row(2, loss=float("nan")), row(3, loss=0.0, accuracy=0.5)]
    (run,) = read_runs([made(tmp_path / "run", rows, torn='{"step": 4, "lo')])
    assert [r["step"] for r in run.rows] == [1, 2, 3]
    assert (run.last("loss"), run.last("grad_norm")) == (0, None)
    assert summary([run]) == ["run: loss 0 after 3 steps"]
    files = write_report([run], tmp_path / "report")
    assert [path.name for path in files] == ["report.html", "metrics.png"]
    (sick,) = read_runs([made(tmp_path / "sick", [row(7, loss=float("nan"))])])
    assert summary([sick]) == ["sick: loss nan after 7 steps"]
    write_report([sick], tmp_path / "other")
