"""Pictures of compared models can be read: every length has a label, and no two lines are alike."""

from __future__ import annotations

from typing import cast

import pytest
from matplotlib.axes import Axes
from matplotlib.colors import to_rgba
from matplotlib.container import ErrorbarContainer

from longrnn.evaluation.figures import Line, heat_maps, lines
from longrnn.intervals import proportion


def labels(panel: Axes, axis: str) -> list[str]:
    return [label.get_text() for label in getattr(panel, f"get_{axis}ticklabels")()]


@pytest.mark.parametrize("models", [2, 12])
def test_lines(models: int) -> None:
    """Labels at all lengths, a style of its own for each model, and its interval."""
    lengths = [256, 1024, 4096, 16384, 65536]
    drawn = [
        Line(f"model {k}", lengths, [proportion(k % 5, 5)] * len(lengths)) for k in range(models)
    ]
    figure = lines(drawn, across="length (tokens)", up="keys recalled")
    (panel,) = figure.axes
    assert labels(panel, "x") == ["256", "1k", "4k", "16k", "64k"]
    assert (panel.get_xlabel(), panel.get_ylabel()) == ("length (tokens)", "keys recalled")
    bars = [cast(ErrorbarContainer, one).lines for one in panel.containers]
    styles = {(to_rgba(line.get_color()), line.get_linestyle()) for line, _, _ in bars}
    assert len(styles) == models
    for line, (_, _, (intervals,)) in zip(drawn, bars, strict=True):
        low, high = intervals.get_segments()[0][:, 1]
        assert (low, high) == pytest.approx(line.values[0][1:3])
    names = [text.get_text() for text in figure.legends[0].get_texts()]
    assert names == [one.label for one in drawn]


def test_heat_maps() -> None:
    """One panel per model with its cells and their values, labelled at every length and place."""
    cells = {(1024, "depth 0%"): 1.0, (1024, "depth 50%"): 0.25, (4096, "depth 0%"): 0.75}
    figure = heat_maps({"one": cells, "other": cells}, "length", "keys recalled")
    first, second, _ = figure.axes
    assert [first.get_title(), second.get_title()] == ["one", "other"]
    assert labels(first, "x") + labels(first, "y") == ["1k", "4k", "depth 0%", "depth 50%"]
    assert sorted(text.get_text() for text in first.texts) == ["0.25", "0.75", "1.00"]
