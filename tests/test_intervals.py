"""Intervals against closed formulas and tables."""

from __future__ import annotations

import math
import random

import pytest

from longrnn.intervals import (
    FIGURE,
    MEAN,
    RATIO,
    SCORE,
    Estimate,
    independent_stretches,
    mean,
    paired_proportion,
    proportion,
    ratio,
)

Z = 1.959963984540054


@pytest.mark.parametrize(("right", "n"), [(10, 10), (0, 10), (8, 10), (1, 1), (37, 1000)])
def test_wilson_by_its_formula(right: int, n: int) -> None:
    """The interval is that of the Wilson score formula."""
    share = right / n
    center = (share + Z**2 / (2 * n)) / (1 + Z**2 / n)
    half = Z / (1 + Z**2 / n) * math.sqrt(share * (1 - share) / n + Z**2 / (4 * n**2))
    estimate = proportion(right, n)
    assert estimate.mean == share
    assert estimate.n == n
    assert estimate.low == pytest.approx(center - half, abs=1e-12)
    assert estimate.high == pytest.approx(center + half, abs=1e-12)
    assert str(proportion(8, 10)) == "0.80 [0.49, 0.94]"


def test_an_interval_of_fewer_independent_questions_is_that_of_their_number() -> None:
    """The share stays, the interval is as wide as with so many questions, and never narrower."""
    assert proportion(40, 50, 10)[:3] == pytest.approx(proportion(8, 10)[:3])
    assert proportion(40, 50, 10).n == 50
    assert proportion(40, 50, 50) == proportion(40, 50)
    assert proportion(40, 50, 99) == proportion(40, 50)
    assert proportion(50, 50, 4.7).low < proportion(5, 5).low
    many, few = answers(60, 20, 10, 10), answers(6, 2, 1, 1)
    assert paired_proportion(*many, 10)[:3] == pytest.approx(paired_proportion(*few)[:3])
    assert paired_proportion(*many, 100) == paired_proportion(*many)


@pytest.mark.parametrize(
    ("starts", "covers", "expected"),
    [
        ([0.0, 0.25, 0.5, 0.75], 0.1, 4),  # apart
        ([0.1, 0.1, 0.1], 0.2, 1),  # one stretch, asked three times
        ([0.0, 0.1], 0.2, 1.5),  # half of each is shared
        ([0.9, 0.0], 0.2, 1.5),  # across the end of the text
        ([0.0, 0.2, 0.4, 0.6, 0.8], 0.5, 2),  # the text is read two and a half times
        ([0.0, 0.5], 3.0, 1),  # all of the text, several times
    ],
)
def test_stretches_that_share_text_count_once(
    starts: list[float], covers: float, expected: float
) -> None:
    """What stretches cover together, over what one of them covers."""
    assert independent_stretches(starts, covers) == pytest.approx(expected)


def test_intervals_over_overlapping_stretches_cover() -> None:
    """Where the answer depends on the text, 95 % of the intervals hold the share over all texts.

    Each text has an answer of its own in each of eight parts, and a stretch of a quarter of a text
    is answered by the part in which it begins: prompts that begin in one part agree.
    """
    rng = random.Random(0)
    naive = honest = 0
    for _ in range(300):
        parts = [rng.random() < 0.7 for _ in range(8)]
        starts = [rng.random() for _ in range(40)]
        right = sum(parts[int(start * 8)] for start in starts)
        one = proportion(right, 40)
        other = proportion(right, 40, independent_stretches(starts, 0.25))
        naive += one.low <= 0.7 <= one.high
        honest += other.low <= 0.7 <= other.high
    assert naive / 300 < 0.8
    assert honest / 300 >= 0.95


def test_t_interval_against_tables() -> None:
    """The interval uses Student's t (2.776 for 4 degrees of freedom)."""
    estimate = mean([1.0, 2.0, 3.0, 4.0, 5.0])
    half = 2.776445 * math.sqrt(2.5 / 5)
    assert estimate == pytest.approx((3.0, 3 - half, 3 + half, 5), abs=1e-5)
    assert mean([2.0, 2.0, 2.0]) == Estimate(2.0, 2.0, 2.0, 3)
    assert mean([0.3]) == Estimate(0.3, -math.inf, math.inf, 1), "one value has no spread"


def answers(both: int, first: int, second: int, neither: int) -> tuple[list[int], list[int]]:
    """Two lists of right and wrong answers with so many pairs of each kind."""
    ours = [1] * both + [1] * first + [0] * second + [0] * neither
    theirs = [1] * both + [0] * first + [1] * second + [0] * neither
    return ours, theirs


def test_paired_proportions_against_a_published_value() -> None:
    """Newcombe (1998), table II, method 10: 36, 12, 2, 0 pairs give 0.0569 to 0.3404."""
    found = paired_proportion(*answers(36, 12, 2, 0))
    assert found == pytest.approx((0.2, 0.0569, 0.3404, 50), abs=1e-4)
    values, others = answers(36, 12, 2, 0)
    turned = paired_proportion(others, values)
    assert turned == pytest.approx((-0.2, -0.3404, -0.0569, 50), abs=1e-4)


def test_paired_proportions_use_the_pairs() -> None:
    """The correlation of the pairs narrows the interval, which never has width 0."""
    paired = paired_proportion(*answers(40, 10, 0, 40))
    crossed = paired_proportion(*answers(25, 25, 15, 25))
    assert paired.mean == crossed.mean
    assert paired.high - paired.low < 0.7 * (crossed.high - crossed.low)
    same = paired_proportion(*answers(10, 0, 0, 0))
    assert same.mean == 0
    assert same.low == pytest.approx(-0.2775, abs=1e-4)
    assert same.high == pytest.approx(0.2775, abs=1e-4)


def test_paired_proportions_cover() -> None:
    """About 95 of 100 intervals contain the true difference."""
    rng = random.Random(0)
    held = 0
    for _ in range(400):
        pairs = []
        for _ in range(30):
            easy = rng.random()
            pairs.append((int(easy < 0.8), int(easy < 0.5 or rng.random() < 0.2)))
        found = paired_proportion([a for a, _ in pairs], [b for _, b in pairs])
        held += found.low <= 0.8 - (0.5 + 0.5 * 0.2) <= found.high
    assert 0.92 <= held / 400 <= 0.99


def test_quantities() -> None:
    """Each kind of quantity has one estimate, and one difference on the same items."""
    a, b = [1.0, 5.0, 9.0], [0.9, 4.8, 8.7]
    assert MEAN.estimate(a) == mean(a)
    assert MEAN.difference is not None
    assert MEAN.difference(a, b) == pytest.approx(mean([0.1, 0.2, 0.3]))
    assert SCORE.estimate([1.0, 0.0, 1.0]) == proportion(2, 3)
    assert SCORE.estimate([0.5, 0.5]) == proportion(1.0, 2), "no spread to estimate from"
    assert SCORE.estimate([0.5, 0.7])[1:] == (0.0, 1.0, 2), "Student's t within 0 and 1"
    assert SCORE.difference is not None
    assert SCORE.difference([1, 1], [1, 0]) == paired_proportion([1, 1], [1, 0])
    assert RATIO.difference is not None
    with pytest.raises(ValueError, match="bytes"):
        RATIO.difference([(1.0, 2)], [(1.0, 3)])
    assert FIGURE.estimate([3.0]) == Estimate(3.0, -math.inf, math.inf, 1)
    assert FIGURE.difference is None


def test_a_ratio_is_of_the_sums() -> None:
    """It is the mean of quotients if denominators are equal, else that of the linearised ratio."""
    tops = [3.0, 5.0, 4.0, 9.0]
    assert ratio([(top, 2.0) for top in tops]) == pytest.approx(mean([top / 2 for top in tops]))
    pairs = [(3.0, 2.0), (5.0, 1.0), (4.0, 4.0)]
    found = ratio(pairs)
    assert found.mean == pytest.approx(12 / 7)
    residuals = [(top - 12 / 7 * bottom) / (7 / 3) for top, bottom in pairs]
    assert found.high - found.mean == pytest.approx(mean(residuals).high)
    assert math.isinf(ratio(pairs[:1]).high)
