"""The report of effective remembrance is self-contained and states its results correctly."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from longrnn.diagnostics.effective_memory_report import summary, write_report

from longrnn.evaluation.memory import MeanEffRem, starts
from longrnn.intervals import Estimate
from tests.diagnostics.conftest import open_alone


def points(position: int, needed: int) -> list[MeanEffRem]:
    """Return EffRem of a prediction that depends on its last `needed` tokens."""
    return [
        MeanEffRem(start, Estimate(0.9 if position - start < needed else 0.03, 0.0, 1.0, 3))
        for start in starts(position)
    ]


def test_in_a_browser(tmp_path: Path, page: Any) -> None:
    """The report has its pictures and tables, and names are escaped."""
    found = {64: points(64, 16), 1024: points(1024, 16)}
    about = {
        "checkpoint": "<b>made</b>", "fingerprint": "0", "mitigation": None,
        "texts": [("a & b.txt", "00")],
    }  # fmt: skip
    report, *pictures = write_report(found, about, tmp_path)
    assert [path.stem for path in pictures] == ["effrem_by_start", "effrem_by_kept"]
    open_alone(page, report)
    widths = page.evaluate("[...document.images].map(i => i.complete && i.naturalWidth)")
    assert len(widths) == 2
    assert min(widths) > 500
    assert page.title() == "Memory of <b>made</b>"
    assert "last 16 tokens" in page.inner_text(".summary")
    rows = page.locator("details tbody tr")
    assert rows.count() == len(starts(64)) + len(starts(1024))
    assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")


def test_summaries() -> None:
    """The summary states the numbers of the longest context."""
    text = summary({64: points(64, 64), 1024: points(1024, 16)})
    assert all(number in text for number in ("1k", "0.030", "16"))
    never = summary({64: points(64, 64)})
    assert all(number in never for number in ("64", "0.900"))
