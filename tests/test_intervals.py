"""Intervals against closed formulas and tables."""

import math

import pytest

from longrnn.intervals import (
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
    share = right / n
    center = (share + Z**2 / (2 * n)) / (1 + Z**2 / n)
    half = Z / (1 + Z**2 / n) * math.sqrt(share * (1 - share) / n + Z**2 / (4 * n**2))
    estimate = proportion(right, n)
    assert estimate.mean == share
    assert estimate.n == n
    assert estimate.low == pytest.approx(center - half, abs=1e-12)
    assert estimate.high == pytest.approx(center + half, abs=1e-12)
    assert proportion(8, 10).show() == "0.80 [0.49, 0.94]"


def test_an_interval_of_fewer_independent_questions_is_that_of_their_number() -> None:
    """The share stays, the interval is as wide as with so many questions, and never narrower."""
    assert proportion(40, 50, 10)[:3] == pytest.approx(proportion(8, 10)[:3])
    assert proportion(40, 50, 10).n == 50
    assert proportion(40, 50, 50) == proportion(40, 50)
    assert proportion(50, 50, 4.7).low < proportion(5, 5).low
    many, few = answers(60, 20, 10, 10), answers(6, 2, 1, 1)
    assert paired_proportion(*many, 10)[:3] == pytest.approx(paired_proportion(*few)[:3])


@pytest.mark.parametrize(
    ("starts", "covers", "expected"),
    [
        ([0.0, 0.25, 0.5, 0.75], 0.1, 4),  # apart
        ([0.1, 0.1, 0.1], 0.2, 1),  # one stretch, asked three times
        ([0.0, 0.1], 0.2, 1.5),  # half of each is shared
        ([0.95, 0.05], 0.2, 1.5),  # across the end of the text
        ([0.0, 0.2, 0.4, 0.6, 0.8], 0.5, 2),  # the text is read two and a half times
        ([0.0, 0.5], 3.0, 1),  # all of the text, several times
    ],
)
def test_stretches_that_share_text_count_once(
    starts: list[float], covers: float, expected: float
) -> None:
    """What stretches cover together, over what one of them covers."""
    assert independent_stretches(starts, covers) == pytest.approx(expected)


def test_t_interval_against_tables() -> None:
    """The interval uses Student's t (2.776 for 4 degrees of freedom)."""
    estimate = mean([1.0, 2.0, 3.0, 4.0, 5.0])
    half = 2.776445 * math.sqrt(2.5 / 5)
    assert estimate == pytest.approx((3.0, 3 - half, 3 + half, 5), abs=1e-5)
    assert mean([2.0, 2.0, 2.0]) == Estimate(2.0, 2.0, 2.0, 3)
    assert mean([0.3]) == Estimate(0.3, -math.inf, math.inf, 1), "one value has no spread"


def test_scores_beyond_0_to_1_have_the_interval_of_a_mean() -> None:
    """Such as lengths, and shares in percent; other scores have an interval within 0 to 1."""
    for values in [5.0, 8.0, 10.0], [7.0, 7.0], [0.5, 100.0], [-1.0, -1.0]:
        assert SCORE.estimate(values) == mean(values)
    for values in [0.1, 0.1, 0.9], [0.7, 0.7], [1.0, 1.0]:
        estimate = SCORE.estimate(values)
        assert 0 <= estimate.low < estimate.mean <= estimate.high <= 1


def answers(both: int, first: int, second: int, neither: int) -> tuple[list[int], list[int]]:
    """Two lists of right and wrong answers with so many pairs of each kind."""
    ours = [1] * both + [1] * first + [0] * second + [0] * neither
    theirs = [1] * both + [0] * first + [1] * second + [0] * neither
    return ours, theirs


def test_paired_proportions_against_a_published_value() -> None:
    """Newcombe (1998), table II, method 10: 36, 12, 2, 0 pairs give 0.0569 to 0.3404."""
    found = paired_proportion(*answers(36, 12, 2, 0))
    assert found == pytest.approx((0.2, 0.0569, 0.3404, 50), abs=1e-4)
    same = paired_proportion(*answers(10, 0, 0, 0))
    assert same[:3] == pytest.approx((0, -0.2775, 0.2775), abs=1e-4), "0 is not certain"


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
