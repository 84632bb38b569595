"""The report of training runs, of real runs and of files that a killed process left."""

import json
from pathlib import Path
from typing import Any

import pytest

from longrnn.reporting.training import summary, write_report
from longrnn.training.run import read_runs
from tests.pages import read_alone, read_tables
from tests.training.runs import tiny, train

pytestmark = pytest.mark.pictures


def made(folder: Path, rows: list[dict[str, Any]], torn: str = "") -> Path:
    """Return a run of which only the metrics are left."""
    folder.mkdir(parents=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows) + torn)
    return folder


def row(step: int, **values: float) -> dict[str, Any]:
    return {"step": step, "tokens": 10 * step, "loss": 1 / step, **values}


def test_the_report_of_two_runs(tmp_path: Path) -> None:
    for name, rate in (("<b>one", 2e-3), ("two", 1e-3)):
        train(tiny("reverse", tmp_path / name, learning_rate=rate))
    write_report(read_runs([tmp_path / "<b>one", tmp_path / "two"]), tmp_path / "report")
    page = read_alone(tmp_path / "report/report.html", pictures=1)
    assert "<title>Training of &lt;b&gt;one, two</title>" in page
    assert "two: loss " in page
    ((_, *runs),) = read_tables(page)
    assert [run[:2] for run in runs] == [["<b>one", "10"], ["two", "10"]]


def test_a_run_that_is_being_written(tmp_path: Path) -> None:
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
