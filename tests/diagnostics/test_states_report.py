"""The report of states opens in a browser and is self-contained."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from matplotlib import image

from longrnn.diagnostics.states import Diagnosis, diagnose
from longrnn.diagnostics.states_report import write_report
from longrnn.diagnostics.states_summary import summary
from tests.contracts.builders import build_model
from tests.diagnostics.conftest import open_alone
from tests.diagnostics.test_states import holding, prompt

PICTURES = [
    "overview", "norm", "deviation", "mean", "retention", "first_share", "channels_90",
    "output_share", "output_norm",
]  # fmt: skip


def make(folder: Path, model: Any, *, checkpoint: str = "made", prompts: int = 2) -> Diagnosis:
    texts = [prompt(f"{seed}.txt", 600, seed) for seed in range(prompts)]
    return diagnose(
        model, texts, train_length=64, output=folder, checkpoint=checkpoint, first=32, quiet=True
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("report")
    write_report(make(folder, holding(1, 2), checkpoint="<b>made</b> & co"), folder)
    return folder


def test_in_a_browser(folder: Path, page: Any) -> None:
    """The report has all pictures, no script error and no external request."""
    open_alone(page, folder / "report.html")
    widths = page.evaluate("[...document.images].map(i => i.complete && i.naturalWidth)")
    shown = page.evaluate("[...document.images].map(i => i.getBoundingClientRect().height)")
    assert len(widths) == len(PICTURES)
    assert min(widths) > 500
    assert min(shown) > 100
    assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
    assert page.title() == "States of <b>made</b> & co"
    assert "1 of 8 heads" in page.inner_text(".summary")
    first, channels, outputs, every = page.locator("table:has(thead)").all()
    assert channels.locator("tbody tr").count() == 2
    assert outputs.locator("tbody tr").count() == 4
    assert first.locator("tbody tr").count() == 2
    assert every.locator("tbody tr").count() == 16
    cells = first.locator("tbody tr").first.locator("td").all_inner_texts()
    assert cells[:3] == ["1", "2", "0.txt"]
    assert "norm" in cells[3]


def test_the_files(folder: Path) -> None:
    """Pictures are not empty and are embedded."""
    for name in PICTURES:
        pixels = image.imread(folder / f"{name}.png")
        assert pixels.shape[0] > 300
        red, green = pixels[..., 0], pixels[..., 1]
        drawn = (red > green + 0.4).sum()
        if name != "output_norm":
            assert drawn > 200, f"{name}: the head that collapses is red"
    html = (folder / "report.html").read_text()
    assert html.count('<img src="data:image/png;base64,') == len(PICTURES)
    assert "http" not in html
    assert "<b>made" not in html


def test_summaries(tmp_path: Path) -> None:
    """The summary states that no head collapses, and when retention is not defined."""
    ill = make(tmp_path, holding(0, 1))
    said, channels = summary(ill).split("\n")
    assert channels.startswith("On 0.txt, ")
    assert said.startswith("1 of 8 heads collapses")
    assert said.count("layer 0 head 1") == 2
    calm = ill._replace(findings=[f._replace(left=(), onset=None) for f in ill.findings])
    assert summary(calm).startswith("None of 8 heads")
    many = [f._replace(left=("norm",), layer=f.layer + 10 * k, onset=99 + k)
            for f in ill.findings for k in range(3)]  # fmt: skip
    said = summary(ill._replace(findings=many))
    assert all(number in said for number in ("24 of 24", "99", "18 more"))


def test_a_cell_without_decays(tmp_path: Path) -> None:
    """Statistics that are not defined have no picture."""
    write_report(make(tmp_path, build_model("rnn"), prompts=1), tmp_path)
    assert sorted(p.stem for p in tmp_path.glob("*.png")) == sorted(
        {*PICTURES} - {"retention", "first_share", "output_share"}
    )
