"""Pictures of compared models can be read: every length has a label, and no two lines are alike."""

from pathlib import Path
from typing import cast

import matplotlib
import pytest
from matplotlib.axes import Axes
from matplotlib.colors import to_rgba
from matplotlib.container import ErrorbarContainer

from longrnn.evaluation.options import CostOptions
from longrnn.intervals import SCORE, mean, proportion
from longrnn.reporting.figures import Panel, curves, heat_maps, lines, png
from longrnn.reporting.tables import Column, ResultTable, TableCell, write_report

pytestmark = pytest.mark.pictures


def labels(panel: Axes, axis: str) -> list[str]:
    return [label.get_text() for label in getattr(panel, f"get_{axis}ticklabels")()]


@pytest.mark.parametrize("models", [2, 12])
def test_lines(models: int) -> None:
    lengths = [256, 1024, 4096, 16384, 65536]
    drawn = {f"model {k}": dict.fromkeys(lengths, proportion(k % 5, 5)) for k in range(models)}
    figure = lines(drawn, across="length (tokens)", up="keys recalled")
    (panel,) = figure.axes
    assert labels(panel, "x") == ["256", "1k", "4k", "16k", "64k"]
    assert (panel.get_xlabel(), panel.get_ylabel()) == ("length (tokens)", "keys recalled")
    bars = [cast(ErrorbarContainer, one).lines for one in panel.containers]
    styles = {(to_rgba(line.get_color()), line.get_linestyle()) for line, _, _ in bars}
    assert len(styles) == models
    for values, (_, _, (intervals,)) in zip(drawn.values(), bars, strict=True):
        low, high = intervals.get_segments()[0][:, 1]
        assert (low, high) == pytest.approx(values[256][1:3])
    names = [text.get_text() for text in figure.legends[0].get_texts()]
    assert names == [*drawn]


def test_heat_maps() -> None:
    cells = {(1024, "depth 0%"): 1.0, (1024, "depth 50%"): 0.25, (4096, "depth 0%"): 0.75}
    figure = heat_maps({"one": cells, "other": cells}, "length", "keys recalled")
    first, second, _ = figure.axes
    assert [first.get_title(), second.get_title()] == ["one", "other"]
    assert labels(first, "x") + labels(first, "y") == ["1k", "4k", "depth 0%", "depth 50%"]
    assert sorted(text.get_text() for text in first.texts) == ["0.25", "0.75", "1.00"]


def test_curves() -> None:
    drawn, grey = {"_one": ([4, 64], [0.1, 9.0])}, {"others": ([4, 64], [2.0, 1.0])}
    panels = [Panel("loss", drawn, grey=grey), Panel("norm", drawn, True, level=1.5, grey=grey)]
    figure = curves(panels, across="tokens", trained=20)
    assert [panel.get_yscale() for panel in figure.axes] == ["linear", "log"]
    assert labels(figure.axes[1], "x") == ["4", "16", "64"]
    assert [len(panel.lines) for panel in figure.axes] == [2 + 1, 2 + 1 + 1]
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["_one"]


def test_values_of_zero_have_an_axis_from_zero() -> None:
    """An axis of shares that are all 0 ends at 1; any other one has room above the intervals."""
    zero = lines({"model": dict.fromkeys([64, 128], proportion(0, 5))}, across="length", up="keys")
    assert zero.axes[0].get_ylim() == (-0.02, 1)
    bits = mean([12.9, 13.0, 12.8])
    (above,) = lines({"model": {64: bits}}, across="length", up="bits").axes
    low, high = above.get_ylim()
    assert low < 0 < 1.03 * bits.high < high
    flat = curves([Panel("accuracy", {"run": ([1, 2], [0.0, 0.0])})], across="step")
    assert flat.axes[0].get_ylim() == (-0.02, 1)


@pytest.mark.parametrize("name", ["_run", r"$\frac$", "a_{b", "$x$ and $y$"])
def test_names_are_drawn_as_they_are(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("matplotlib.rcParams", matplotlib.RcParams({**matplotlib.rcParams}))
    matplotlib.rcParams["axes.facecolor"] = "red"
    share = proportion(1, 5)
    figures = [
        lines({name: {256: share}}, across="length", up=name),
        heat_maps({name: {(256, "depth 0%"): share.mean}}, "length", name),
        curves([Panel(name, {name: ([1, 2], [1.0, 2.0])})], across="step"),
    ]
    for figure in figures:
        assert png(figure).startswith(b"\x89PNG")
        assert all(panel.get_facecolor()[:3] != (1, 0, 0) for panel in figure.axes)
    for figure in (figures[0], figures[2]):
        assert [text.get_text() for text in figure.legends[0].get_texts()] == [name]


def test_pictures_of_one_name_have_files_of_their_own(tmp_path: Path) -> None:
    """Titles of evaluations that differ in their signs alone give the same name of a picture."""
    tables = []
    for title, value in (("recall (a)", 0.25), ("recall [a]", 0.75)):
        column = Column("keys", SCORE)
        cell = TableCell(title, "keys", "m", 256, proportion(4 * value, 4), None, None, column)
        tables.append(
            ResultTable(CostOptions(name=title, lengths=[256]).evaluation(), {"m": []}, [cell])
        )
    _, _, *pictures = write_report(tables, [], tmp_path)
    first, second = (picture.read_bytes() for picture in pictures)
    assert first != second


def test_long_names_are_inside_the_picture() -> None:
    name = f"passkey-tiny+state_norm(threshold={[[30.1] * 8] * 4})".replace(" ", "")
    share = proportion(1, 5)
    one = lines({name: {256: share}}, across="length", up="keys")
    other = heat_maps({name: {(256, "depth 0%"): share.mean}}, "length", "keys")
    for figure, found in (one, one.legends[0].get_texts()[0]), (other, other.axes[0].title):
        figure.draw_without_rendering()
        box = found.get_window_extent()
        assert "".join(found.get_text().split()) == name
        assert figure.bbox.x0 <= box.x0 < box.x1 <= figure.bbox.x1
