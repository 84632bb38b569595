"""T_forget and T_recall of families with synthetic evaluations, and the fits through them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

import pytest

from longrnn.errors import UserError
from longrnn.results import Row
from longrnn.studies.capacity import (
    Bounded,
    Fit,
    Member,
    Recorded,
    fit,
    member,
    read_recorded,
    sizes,
)


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
    one = member("one", "a", 100, 64, recorded)
    assert one == Member("one", "a", 100, 64, True, 1.9, 512, 1024)
    two = member("two", "b", 100, 64, recorded)
    assert (two.robust, two.recalled, two.asked) == (False, None, None)
    # Nothing beyond the training length: not judged.
    assert member("two", "b", 100, 192, recorded).robust is None
    with pytest.raises(UserError, match="no recorded evaluation of three"):
        member("three", "c", 100, 64, recorded)


def family(*members: tuple[int, int, bool | None, int | None]) -> list[Member]:
    return [
        Member(f"{k}", f"{k}", size, trained, robust, 1.0, recalled, 4096)
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
    assert found[0][1:] == (Bounded(512, ""), Bounded(1024, ""))
    assert found[1][1:] == (Bounded(256, "≤"), Bounded(4096, "≥"))
    assert found[2][1:] == (Bounded(512, ">"), None)
    assert found[3][1:] == (None, None)
    # A length that passes below one that fails; one of several models of a length that fails.
    assert [size.forget for size in found[4:]] == [Bounded(1024, ""), Bounded(512, "")]
    assert str(found[1].recall) == "≥ 4,096"
    with pytest.raises(UserError, match="2 different state sizes and a fit needs 3"):
        sizes(family((10, 256, True, 1), (20, 256, True, 1)))


def known(points: dict[int, float]) -> dict[int, Bounded | None]:
    return {size: Bounded(round(value), "") for size, value in points.items()}


def test_the_line() -> None:
    """Fits recover known parameters, with the intervals of scipy."""
    from scipy import stats

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
    assert "4 sizes" in str(found)


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
    found = fit(form, {size: Bounded(size * 100, bound) for size, bound in points.items()})
    assert isinstance(found, str)
    assert says in found


def test_points_that_do_not_differ() -> None:
    """A constant length gives the reason why there is no fit."""
    found = fit("line", {n: Bounded(256, "") for n in (1, 2, 3)})
    assert found == "no fit: the length is 256 at every state size"


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
    with pytest.raises(UserError, match="no results at"):
        read_recorded([tmp_path / "none"])
    with pytest.raises(UserError, match="holds no passkey or perplexity evaluation"):
        read_recorded([tmp_path / "metrics.jsonl"])
    (tmp_path / "torn.jsonl").write_text("{")
    with pytest.raises(UserError, match="is not a results file"):
        read_recorded([tmp_path])
