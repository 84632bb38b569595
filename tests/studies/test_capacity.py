"""T_forget and T_recall of families with synthetic evaluations, and the fits through them."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from scipy import stats

from longrnn.errors import UserError
from longrnn.intervals import Estimate
from longrnn.results import Row
from longrnn.studies.capacity import (
    Bounded,
    Member,
    Recorded,
    member,
    read_recorded,
    sizes,
)
from longrnn.studies.capacity_fits import (
    Fit,
    conclusion,
    fit,
    points_to_settle,
    ratio_by_size_and_length,
)
from tests.refusals import naming


def losses(*nats: float) -> Row:
    """Return one window with losses by stretches of 64 tokens."""
    return {"length": 64 * len(nats), "stretches": list(nats)}


def answers(length: int, right: int, wrong: int) -> list[Row]:
    said = [True] * right + [False] * wrong
    return [{"model": "m", "length": length, "correct": correct} for correct in said]


def test_a_member() -> None:
    """The criterion uses the longest windows, and an accuracy of exactly 95 % does not count."""
    recorded = Recorded(
        {"a": [losses(9.0), losses(1.0, 1.5, 1.9)], "b": [losses(1.0, 1.0, 2.1)]},
        {"a": [*answers(256, 20, 0), *answers(512, 39, 1), *answers(1024, 19, 1)]},
    )
    one = member("one", "a", 100, 64, 3, recorded)
    assert one == Member("one", "a", 100, 64, 3, True, 1.9, 512, 1024)
    two = member("two", "b", 100, 64, 0, recorded)
    assert (two.robust, two.recalled, two.asked) == (False, None, None)
    # Nothing beyond the training length: not judged.
    assert member("two", "b", 100, 192, 0, recorded).robust is None
    with pytest.raises(UserError):
        member("three", "c", 100, 64, 0, recorded)


def family(*members: tuple[int, int, bool | None, int | None], seed: int = 0) -> list[Member]:
    return [
        Member(f"{k}", f"{k}", size, trained, seed, robust, 1.0, recalled, 4096)
        for k, (size, trained, robust, recalled) in enumerate(members)
    ]


def test_sizes() -> None:
    """The shortest training length tried and the longest prompt evaluated are bounds."""
    found = sizes(
        family(
            (10, 256, False, 512), (10, 512, True, 1024), (10, 1024, True, 256),
            (20, 256, True, 4096), (20, 512, True, None),
            (30, 512, False, 0), (30, 256, False, 0),
            (40, 256, None, None),
            (50, 256, True, 0), (50, 512, False, 0), (50, 1024, True, 0), (50, 2048, True, 0),
            (60, 256, True, 0), (60, 256, False, 0), (60, 256, True, 0), (60, 512, True, 0),
        )
    )  # fmt: skip
    assert [size.state_size for size in found] == [10, 20, 30, 40, 50, 60]
    assert found[0][2:] == (Bounded(512, ""), Bounded(1024, ""))
    assert found[1][2:] == (Bounded(256, "≤"), Bounded(4096, "≥"))
    assert found[2][2:] == (Bounded(512, ">"), None)
    assert found[3][2:] == (None, None)
    # A length that passes below one that fails; one of several models of a length that fails.
    assert [size.forget for size in found[4:]] == [Bounded(1024, ""), Bounded(512, "")]
    assert str(found[1].recall) == "≥ 4,096"
    with pytest.raises(UserError, match=naming(2, 3)):
        sizes(family((10, 256, True, 1), (20, 256, True, 1)))


def test_every_seed_has_a_point_of_its_own() -> None:
    """Models of one state size and different seeds are not one family."""
    first = family((10, 64, False, 1), (10, 128, True, 1), (20, 64, True, 1), (30, 64, True, 1))
    other = family((10, 64, True, 1), (10, 128, True, 512), (20, 64, False, 1), seed=1)
    found = sizes([*first, *other])
    assert [(size.state_size, size.seed) for size in found] == [
        (10, 0), (10, 1), (20, 0), (20, 1), (30, 0),
    ]  # fmt: skip
    assert [str(size.forget) for size in found[:2]] == ["128", "≤ 64"]
    assert found[1].recall == Bounded(512, "")


def known(points: dict[int, float]) -> list[tuple[int, Bounded | None]]:
    return [(size, Bounded(round(value), "")) for size, value in points.items()]


def test_the_line() -> None:
    """Fits recover known parameters, with the intervals of scipy."""
    points = {1000: 700.0, 2000: 1190.0, 3000: 1730.0, 5000: 2700.0}
    found = fit("line", known(points))
    assert isinstance(found, Fit)
    peer = cast(Any, stats.linregress([1, 2, 3, 5], list(points.values())))
    assert found.parameters == pytest.approx([peer.slope, peer.intercept])
    half = stats.t.ppf(0.975, 2) * peer.stderr
    assert found.intervals[0] == pytest.approx((peer.slope - half, peer.slope + half), rel=1e-5)
    assert found.r_squared == pytest.approx(peer.rvalue**2)
    assert found.at(4000) == pytest.approx(4 * peer.slope + peer.intercept)
    assert str(found).startswith("a · N + b: a = ")
    assert "4 points" in str(found)


@pytest.mark.parametrize("base", [1.365, 2.7, 1.02])
def test_the_exponential(base: float) -> None:
    """The exponential fit converges on points of an exponential curve."""
    points = {1000 * n: 4756 * (base**n - 1) + 742 for n in (1, 2, 4, 6, 8)}
    found = fit("exponential", known(points))
    assert isinstance(found, Fit)
    assert found.parameters == pytest.approx([4756, 742, base], rel=0.15)
    for size, value in points.items():
        assert found.at(size) == pytest.approx(value, rel=0.01)
    assert all(low <= value <= high for value, (low, high) in zip(
        found.parameters, found.intervals, strict=True))  # fmt: skip


@pytest.mark.parametrize(
    ("form", "points", "says"),
    [
        ("line", {1: "", 2: "", 3: "≥"}, "2 of 3 state sizes"),
        ("exponential", {1: "", 2: "", 3: ""}, "needs 4"),
        ("line", {}, "0 of 0"),
    ],
)
def test_too_few_points(form: str, points: dict[int, str], says: str) -> None:
    """Too few points give the reason why there is no fit."""
    found = fit(form, [(size, Bounded(size * 100, bound)) for size, bound in points.items()])
    assert isinstance(found, str)
    assert says in found


def test_points_that_do_not_differ() -> None:
    """A constant length gives the reason why there is no fit."""
    found = fit("line", [(n, Bounded(256, "")) for n in (1, 2, 3)])
    assert str(found).startswith("no fit: ")


def test_the_power() -> None:
    """The power is the line through the logarithms, and recovers an exact power."""
    exact = fit("power", [(1000 * n, Bounded(100 * n**3, "")) for n in (1, 2, 4, 8)])
    assert isinstance(exact, Fit)
    assert exact.parameters == pytest.approx([100, 3])
    assert exact.at(3000) == pytest.approx(2700)
    points = [(1000, 70), (1000, 90), (4000, 100), (16000, 90), (64000, 200)]
    found = fit("power", [(size, Bounded(value, "")) for size, value in points])
    assert isinstance(found, Fit)
    x, y = (np.log([pair[k] / 1000 ** (1 - k) for pair in points]) for k in (0, 1))
    peer = cast(Any, stats.linregress(x, y))
    assert found.parameters == pytest.approx([math.exp(peer.intercept), peer.slope])
    half = stats.t.ppf(0.975, 3) * peer.stderr
    assert found.intervals[1] == pytest.approx((peer.slope - half, peer.slope + half), rel=1e-5)
    assert found.r_squared == pytest.approx(peer.rvalue**2)
    assert "a · N^b" in str(found)


def slope(value: float, error: float, n: int) -> Estimate:
    """Return the slope of a line through n points with this standard error."""
    half = float(stats.t.ppf(0.975, n - 2)) * error
    return Estimate(value, value - half, value + half, n)


def test_points_to_settle_a_slope() -> None:
    """The number of points is the one at which simulated fits exclude 0 in 80 % of cases."""
    few = slope(1.0, 0.8, 6)
    needed = points_to_settle(few, 2)
    assert needed is not None
    assert f"{needed} points" in conclusion(few, 2, "points")
    generator = np.random.default_rng(0)
    scatter = 0.8 * math.sqrt(6)  # of one point, where the sizes have a deviation of 1
    excluded = []
    for _ in range(4000):
        x = np.tile([-1.0, 1.0], needed)[:needed]
        y = 1.0 * x + scatter * generator.standard_normal(needed)
        found = cast(Any, stats.linregress(x, y))
        excluded.append(abs(found.slope) > stats.t.ppf(0.975, needed - 2) * found.stderr)
    assert np.mean(excluded) == pytest.approx(0.8, abs=0.03)
    assert conclusion(slope(1.0, 0.1, 6), 2, "points") == "the interval excludes 0"
    assert points_to_settle(slope(0.0, 0.1, 6), 2) is None
    assert "100,000" in conclusion(slope(0.0, 0.1, 6), 2, "models")
    line = fit("line", known({1000: 70, 2000: 90, 3000: 130}))
    assert isinstance(line, Fit)
    assert line.slope() == Estimate(line.parameters[0], *line.intervals[0], 3)


def test_the_ratio_by_size_and_length() -> None:
    """Both influences are recovered from models that follow them, with intervals around them."""
    generator = np.random.default_rng(0)
    members = []
    for size in (512, 2048, 8192, 32768):
        for length in (64, 128, 256):
            exponent = 0.1 * math.log2(size) - 0.4 * math.log2(length) + 3
            ratio = 2 ** (exponent + 0.02 * generator.standard_normal())
            members.append(Member("m", "m", size, length, 0, ratio <= 2, ratio, None, None))
    found = ratio_by_size_and_length(members)
    assert not isinstance(found, str)
    for estimate, value in ((found.by_state, 0.1), (found.by_length, -0.4)):
        assert estimate.low < value < estimate.high
        assert estimate.mean == pytest.approx(value, abs=0.02)
        assert estimate.n == 12
    assert "models" in str(ratio_by_size_and_length(members[:3]))
    # One length only: the two influences cannot be separated.
    assert "models" in str(ratio_by_size_and_length(members[::3]))


def write(path: Path, header: Row, *rows: Row) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in (header, *rows)))


def test_what_is_recorded(tmp_path: Path) -> None:
    """Rows are assigned by the fingerprint of the model, and other files are ignored."""
    write(tmp_path / "a/p.jsonl", {"evaluation": "perplexity", "model": "x"}, losses(1.0))
    write(tmp_path / "a/b/p.jsonl", {"evaluation": "perplexity", "model": "x"}, losses(2.0))
    models = {"m": "x", "other": "y"}
    passkey: dict[str, Any] = {"evaluation": "passkey", "models": models}
    write(tmp_path / "k.jsonl", passkey, *answers(256, 1, 1))
    write(tmp_path / "c.jsonl", {**passkey, "chunk_select": 64}, *answers(256, 9, 0))
    write(tmp_path / "metrics.jsonl", {"step": 1, "loss": 2.0})
    found = read_recorded([tmp_path])
    assert sorted(row["stretches"][0] for row in found.perplexity["x"]) == [1.0, 2.0]
    assert [len(found.passkey[name]) for name in ("x", "y")] == [2, 0]
    with pytest.raises(UserError):
        read_recorded([tmp_path / "none"])
    with pytest.raises(UserError):
        read_recorded([tmp_path / "metrics.jsonl"])
    (tmp_path / "torn.jsonl").write_text("{")
    with pytest.raises(UserError):
        read_recorded([tmp_path])
