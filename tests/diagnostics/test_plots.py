"""Plots show their rows."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from longrnn.diagnostics.loss_curves import losses_by_position
from matplotlib import image

from longrnn.evaluation.figures import (
    lengths_axis,
    loss_by_position,
    new_figure,
    passkey_by_position,
    passkey_heat_map,
)
from longrnn.evaluation.perplexity import STRETCH, edges
from longrnn.results import Row


def rows(model: str, right: float, lengths: tuple[int, ...] = (256, 1024)) -> list[Row]:
    return [
        {"model": model, "length": length, "depth": depth, "index": i, "correct": i < right * 4}
        for length in lengths
        for depth in (0.0, 0.5, 1.0)
        for i in range(4)
    ]


def picture(path: Path) -> np.ndarray:
    return image.imread(path)[..., :3]


def green_and_red(pixels: np.ndarray) -> tuple[int, int]:
    red, green = pixels[..., 0], pixels[..., 1]
    return int((green > red + 0.3).sum()), int((red > green + 0.3).sum())


def test_the_picture_is_real(tmp_path: Path) -> None:
    """A heat map is a valid PNG that is not empty."""
    path = tmp_path / "new/heatmap.png"
    passkey_heat_map(rows("good", 1.0), path)
    pixels = picture(path)
    assert pixels.shape[0] > 200
    assert pixels.shape[1] > 200
    assert len(np.unique(pixels.reshape(-1, 3), axis=0)) > 20
    assert [p.name for p in path.parent.iterdir()] == ["heatmap.png"]


def test_colours_follow_the_scores(tmp_path: Path) -> None:
    """The colour scale is fixed from 0 to 1."""
    counts = {}
    for name, right in (("good", 1.0), ("bad", 0.0)):
        passkey_heat_map(rows(name, right), tmp_path / f"{name}.png")
        counts[name] = green_and_red(picture(tmp_path / f"{name}.png"))
    (green, red), (less_green, more_red) = counts["good"], counts["bad"]
    assert green > 5 * less_green
    assert more_red > 5 * red


@pytest.mark.parametrize(("right", "dark"), [(1.0, (0, 104, 55)), (0.0, (165, 0, 38))])
def test_figures_and_title_of_a_heat_map_can_be_read(
    right: float, dark: tuple[int, int, int], tmp_path: Path
) -> None:
    """Figures on dark cells are lighter than the cells; a long title stays above its panel."""
    name = "passkey-tiny-short+sliding_window(window=8192)+state_norm(max_norm=0.25)"
    passkey_heat_map(rows(name, right, (512,)), tmp_path / "map.png")
    pixels = picture(tmp_path / "map.png")
    cells = np.abs(pixels - np.array(dark) / 255).max(axis=-1) < 0.02
    down, across = (np.flatnonzero(cells.mean(axis=axis) > 0.3) for axis in (1, 0))
    inside = pixels[down[0] + 3 : down[-1] - 2, across[0] + 3 : across[-1] - 2].sum(axis=-1)
    assert inside.min() > sum(dark) / 255 - 0.1
    assert inside.max() > 2.9
    assert (pixels[: down[0] - 8, across[-1] + 5 :] == 1).all(), "the title is above its panel"


def test_one_panel_for_each_model(tmp_path: Path) -> None:
    """Several models have separate panels; one length and one depth are enough."""
    passkey_heat_map(rows("a", 1.0), tmp_path / "one.png")
    passkey_heat_map(rows("a", 1.0) + rows("b", 0.0), tmp_path / "two.png")
    one, two = picture(tmp_path / "one.png"), picture(tmp_path / "two.png")
    assert two.shape[1] > 1.4 * one.shape[1]
    green, red = green_and_red(two)
    assert green > 5000
    assert red > 5000
    single = [row for row in rows("a", 0.5, (4096,)) if row["depth"] == 0.5]
    passkey_heat_map(single, tmp_path / "single.png")
    assert picture(tmp_path / "single.png").size


def test_by_position_and_distance(tmp_path: Path) -> None:
    """Cells by position are drawn, and cells that were not evaluated are grey."""
    counts = {}
    for name, far in (("good", True), ("bad", False)):
        made = [
            {"model": m, "length": t, "insert_at": place, "index": 0, "correct": far or t < 2048}
            for m in ("a", "b")
            for t in (1024, 2048, 4096)
            for place in (0, 512, 1024)
            if place < t
        ]
        passkey_by_position(made, tmp_path / f"{name}.png")
        counts[name] = green_and_red(picture(tmp_path / f"{name}.png"))
    assert counts["good"][0] > 2 * counts["bad"][0]
    assert counts["bad"][1] > 3 * counts["good"][1]


def losses(late: float, documents: int) -> list[Row]:
    """Return rows with a loss around 1, and `late` in the last quarter."""
    stretches = 16
    length = STRETCH * stretches
    return [
        {
            "length": length,
            "bytes_per_token": 1.0,
            "nats_per_token": 1.0,
            "buckets": [1 + k / 10] * (len(edges(length)) - 2) + [late],
            "stretches": [1 + k / 10] * (stretches * 3 // 4) + [late] * (stretches // 4),
        }
        for k in range(documents)
    ]


def test_loss_by_position(tmp_path: Path) -> None:
    """The loss is drawn completely, with intervals for several documents and a bound."""
    shades = {}
    for name, rows, trained in [
        ("calm", losses(1.0, 3), 256),
        ("broken", losses(9.0, 3), 256),
        ("one", losses(9.0, 1), None),
        ("not judged", losses(9.0, 1), 4096),
    ]:
        loss_by_position(rows, tmp_path / f"{name}.png", trained)
        pixels = picture(tmp_path / f"{name}.png")
        blue = (pixels[..., 2] > pixels[..., 0] + 0.2).sum(axis=1)
        red = (pixels[..., 0] > pixels[..., 2] + 0.3).sum()
        shades[name] = (blue.nonzero()[0].min() / len(blue), int(red))
    top = {name: first for name, (first, _) in shades.items()}
    assert top["calm"] > 0.4, "the curve lies below the bound"
    assert top["broken"] < 0.2, "the curve rises to the top"
    assert shades["calm"][1] > 100
    assert shades["one"][1] == shades["not judged"][1] == 0


def test_losses_of_several_models_are_in_one_figure(tmp_path: Path) -> None:
    """Every model has a line, also where lines coincide, and the legend stands below the panel."""
    one, names = losses(2.0, 3), [f"a+sliding_window(window={k})" for k in range(12)]
    for row in one:
        row["bucket_bytes"] = None
    losses_by_position({"a": one}, tmp_path / "one.png", 256)
    losses_by_position(dict.fromkeys(names, one), tmp_path / "all.png", [256, None] * 6)
    alone, together = picture(tmp_path / "one.png"), picture(tmp_path / "all.png")
    assert together.shape[1] == alone.shape[1]
    assert together.shape[0] > alone.shape[0] + 11 * 15, "one line of the legend for each model"
    colours = {tuple((pixel * 255).astype(int)) for pixel in together.reshape(-1, 3)}
    drawn = {(31, 119, 180), (255, 127, 14), (44, 160, 44), (214, 39, 40), (148, 103, 189)}
    assert drawn <= colours


@pytest.mark.parametrize(
    ("length", "measured", "labels"),
    [
        (614, [512], ["512"]),  # one length, with room on both sides
        (78643, [4096, 61440, 65536], ["4k", "60k"]),  # labels do not overlap
        (4000, [1000, 2000, 3000, 4000], ["1000", "2000", "3000", "4000"]),
        (512, [], ["1", "4", "16", "64", "256", "512"]),
        (5000, [], ["1", "4", "16", "64", "256", "1k", "4k"]),
    ],
)
def test_an_axis_of_lengths_has_ticks(length: int, measured: list[int], labels: list[str]) -> None:
    panel = new_figure(4, 3).subplots()
    lengths_axis(panel, length, least=min(measured, default=1), measured=measured)
    assert [label.get_text() for label in panel.get_xticklabels()] == labels
