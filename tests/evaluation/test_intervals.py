"""Intervals against closed formulas and tables."""

from __future__ import annotations

import math

import pytest

from longrnn.evaluation.intervals import Estimate, mean, proportion

Z = 1.959963984540054


@pytest.mark.parametrize(("right", "n"), [(10, 10), (0, 10), (8, 10), (1, 1), (37, 1000)])
def test_wilson_by_its_formula(right: int, n: int) -> None:
    """An interval of another kind (Wald has no width at 10 of 10)."""
    share = right / n
    center = (share + Z**2 / (2 * n)) / (1 + Z**2 / n)
    half = Z / (1 + Z**2 / n) * math.sqrt(share * (1 - share) / n + Z**2 / (4 * n**2))
    estimate = proportion(right, n)
    assert estimate.mean == share
    assert estimate.n == n
    assert estimate.low == pytest.approx(center - half, abs=1e-12)
    assert estimate.high == pytest.approx(center + half, abs=1e-12)


def test_wilson_against_known_values() -> None:
    """The formula copied wrongly into test and code alike (10 of 10: [0.722, 1])."""
    assert proportion(10, 10).low == pytest.approx(0.7225, abs=1e-4)
    assert proportion(10, 10).high == pytest.approx(1)
    assert proportion(0, 10).low == pytest.approx(0, abs=1e-12)
    assert proportion(0, 10).high == pytest.approx(0.2775, abs=1e-4)
    assert str(proportion(8, 10)) == "0.80 [0.49, 0.94]"


def test_t_interval_against_tables() -> None:
    """A normal interval in the place of Student's (t of 4 degrees of freedom is 2.776)."""
    estimate = mean([1.0, 2.0, 3.0, 4.0, 5.0])
    half = 2.776445 * math.sqrt(2.5 / 5)
    assert estimate == pytest.approx((3.0, 3 - half, 3 + half, 5), abs=1e-5)
    assert mean([2.0, 2.0, 2.0]) == Estimate(2.0, 2.0, 2.0, 3)


def test_one_value_says_nothing_of_the_spread() -> None:
    """A division by zero, or an interval of no width from one sample."""
    assert mean([0.3]) == Estimate(0.3, -math.inf, math.inf, 1)
