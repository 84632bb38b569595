"""The report of a comparison opens in a browser, is self-contained and shows every result."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from longrnn.comparison.compare import Cell
from longrnn.diagnostics.comparison import write_report
from matplotlib import image

from longrnn.intervals import Estimate, figure, proportion
from tests.diagnostics.conftest import open_alone

MODELS = {"a<b>": "runs/a, fingerprint 1", "two": "runs/two, fingerprint 2"}
REASON = "this llama was made for at most 1,024 tokens: give it shorter texts"


def cells() -> list[Cell]:
    """Return recall and cost of two models, one of which does not reach 4k."""
    found, size = [], dict(zip(MODELS, (100.0, 250.0), strict=True))
    for at, right in ((256, 9), (1024, 5), (4096, 0)):
        for model in MODELS:
            gone = model == "two" and at == 4096
            less = None if model != "two" or gone else Estimate(-0.125, -0.5, 0.25, 10)
            keys = None if gone else proportion(right, 10)
            reason = REASON if gone else None
            found += [
                Cell("quick", "keys", model, at, keys, less, reason, ".2f"),
                Cell("quick", "memory", model, at, figure([size[model] * at]), None, None, ",.0f"),
            ]
    return [*found, Cell("tasks", "acc", "two", None, proportion(1, 2), None, None, ".2f")]


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("comparison")
    suites = {"quick": "evaluations: [<i>]", "tasks": "seed: 1"}
    return write_report(cells(), folder, models=MODELS, suites=suites)


def test_in_a_browser(written: list[Path], page: Any) -> None:
    """The report has all pictures, no script error, and every cell in its row."""
    open_alone(page, written[0])
    widths = page.evaluate("[...document.images].map(i => i.complete && i.naturalWidth)")
    assert len(widths) == 2
    assert min(widths) > 500
    assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
    assert page.title() == "a<b> against two"
    assert "2 models, 2 suites" in page.inner_text(".summary")
    assert page.inner_text(".summary")
    quick, tasks = page.locator("table.comparison").all()
    assert quick.locator("th").all_inner_texts() == ["length", "model", "keys", "memory"]
    rows = [row.locator("td").all_inner_texts() for row in quick.locator("tbody tr").all()]
    assert rows[1] == ["256", "two", "0.90 [0.60, 0.98]\n−0.12 [−0.50, +0.25]", "64,000"]
    assert rows[5] == ["4k", "two", REASON, "1,024,000"]
    assert [row.inner_text().split("\t") for row in tasks.locator("tbody tr").all()] == [
        ["–", "two", "0.50 [0.09, 0.91]"]
    ]


def test_the_files(written: list[Path]) -> None:
    """Pictures are not empty and are embedded, and names are escaped."""
    assert [path.name for path in written] == [
        "report.html", "quick_keys.png", "quick_memory.png"
    ]  # fmt: skip
    for path in written[1:]:
        pixels = image.imread(path)[..., :3]
        blue, orange = ((abs(pixels - colour).max(-1) < 0.2).sum() for colour in COLOURS)
        assert blue > 200
        assert orange > 200
    html = written[0].read_text()
    assert html.count('<img src="data:image/png;base64,') == 2
    assert "http" not in html
    assert "a<b>" not in html
    assert "[<i>]" not in html
    assert "two" in html


# Those of matplotlib's first two lines.
COLOURS = ((0.12, 0.47, 0.71), (1.0, 0.5, 0.05))
