"""95 % intervals, one per kind of quantity.

A share of right answers has Wilson's interval, a mean of numbers Student's t, and a ratio of two
sums Student's t of the linearised ratio. A difference between two models is paired by item:
Newcombe's interval for shares, Student's t for the others.
"""

import math
from collections.abc import Callable, Sequence
from functools import cache
from statistics import NormalDist
from typing import Any, NamedTuple

NORMAL_QUANTILE = NormalDist().inv_cdf(0.975)


class Estimate(NamedTuple):
    """A value with its 95 % interval over `n` samples; infinite ends where there is none."""

    mean: float
    low: float
    high: float
    n: int

    @property
    def has_interval(self) -> bool:
        """Whether its interval is finite."""
        return math.isfinite(self.high - self.low)

    def show(self, form: str = ".2f", sign: str = "") -> str:
        """Return the value with its interval as text."""
        mean, low, high = (format(value, f"{sign}z{form}").replace("-", "−") for value in self[:3])
        return f"{mean} [{low}, {high}]" if self.has_interval else mean


def proportion(right: float, n: int, independent: float | None = None) -> Estimate:
    """Return a share with its Wilson score interval.

    Args:
        right: right answers.
        n: questions.
        independent: how many of the questions count as independent; None for all. The interval is
            that of as many questions with the same share.
    """
    size = n if independent is None else min(independent, n)
    share, z = right / n, NORMAL_QUANTILE
    center = (share + z**2 / (2 * size)) / (1 + z**2 / size)
    half = z / (1 + z**2 / size) * math.sqrt(share * (1 - share) / size + z**2 / (4 * size**2))
    return Estimate(share, max(center - half, 0.0), min(center + half, 1.0), n)


def mean(values: Sequence[float]) -> Estimate:
    """Return a mean with its Student-t interval, which is infinite for one value."""
    n = len(values)
    center = sum(values) / n
    if n == 1:
        return Estimate(center, -math.inf, math.inf, 1)
    deviation = math.sqrt(sum((value - center) ** 2 for value in values) / (n - 1))
    half = _t_quantile(n - 1) * deviation / math.sqrt(n)
    return Estimate(center, center - half, center + half, n)


@cache
def _t_quantile(degrees: int) -> float:
    """Return the quantile 0.975 of Student's t."""
    from scipy.special import stdtrit  # scipy takes longer to import than many evaluations need

    return float(stdtrit(degrees, 0.975))


def ratio(pairs: Sequence[tuple[float, float]]) -> Estimate:
    """Return Σ numerators / Σ denominators with its Student-t interval over the pairs.

    The variance is that of the linearised ratio (Cochran, Sampling Techniques, 1977, section 6.4).
    With equal denominators it is `mean` of the quotients; for one pair the interval is infinite.
    """
    total = sum(bottom for _, bottom in pairs)
    center = sum(top for top, _ in pairs) / total
    size = total / len(pairs)
    return mean([center + (top - center * bottom) / size for top, bottom in pairs])


def paired_proportion(
    values: Sequence[float], others: Sequence[float], independent: float | None = None
) -> Estimate:
    """Return how far a share of right answers is above another to the same questions.

    The interval is Newcombe's (1998, method 10): it combines the Wilson intervals of the two shares
    by their correlation, and does not shrink to nothing where all answers agree.

    Args:
        values: 1 where right, else 0.
        others: likewise, of the same questions.
        independent: how many of the questions count as independent; None for all.
    """
    n = len(values)
    size = n if independent is None else min(independent, n)
    pairs = list(zip(values, others, strict=True))
    counts = [sum(pair == kind for pair in pairs) for kind in ((1, 1), (1, 0), (0, 1), (0, 0))]
    right, other_right = counts[0] + counts[1], counts[0] + counts[2]
    both, first, second, neither = (count * size / n for count in counts)
    product = (both + first) * (second + neither) * (both + second) * (first + neither)
    excess = both * neither - first * second
    if excess > 0:
        excess = max(excess - size / 2, 0)  # a continuity correction
    phi = excess / math.sqrt(product) if product else 0.0
    a, b = proportion(right, n, independent), proportion(other_right, n, independent)

    def width(x: float, y: float) -> float:
        return math.sqrt(max(x * x - 2 * phi * x * y + y * y, 0.0))

    center = a.mean - b.mean
    low = center - width(a.mean - a.low, b.high - b.mean)
    return Estimate(center, low, center + width(a.high - a.mean, b.mean - b.low), n)


def independent_stretches(starts: Sequence[float], covers: float) -> float:
    """Return how many stretches of one text count as independent.

    Stretches that read the same text are not two samples of texts of its kind. What all of them
    cover together, over what one of them covers, is how many stretches without a common token would
    have read as much. This is conservative: it gives no credit for different keys in one stretch.

    Args:
        starts: where each begins, as shares of a text that is read in a circle.
        covers: what each reads, as a share of the text; more than 1 where it repeats.

    Returns:
        From 1 to the number of different starts.
    """
    places = sorted({start % 1.0 for start in starts})
    gaps = [b - a for a, b in zip(places, [*places[1:], places[0] + 1.0], strict=True)]
    return max(sum(min(gap, covers) for gap in gaps) / covers, 1.0)


class Quantity(NamedTuple):
    """How samples of one kind become an estimate, and a difference of two models.

    Attributes:
        estimate: of samples.
        difference: of samples and those of another model on the same items.
    """

    estimate: Callable[[Sequence[Any]], Estimate]
    difference: Callable[[Sequence[Any], Sequence[Any]], Estimate]


def _score(values: Sequence[float]) -> Estimate:
    if not all(0 <= value <= 1 for value in values):
        return mean(values)
    # Equal scores have no spread to estimate an interval from.
    if set(values) <= {0, 1} or len(set(values)) == 1:
        return proportion(sum(values), len(values))
    estimate = mean(values)
    return estimate._replace(low=max(estimate.low, 0.0), high=min(estimate.high, 1.0))


def _difference(values: Sequence[float], others: Sequence[float]) -> Estimate:
    return mean([a - b for a, b in zip(values, others, strict=True)])


def _score_difference(values: Sequence[float], others: Sequence[float]) -> Estimate:
    is_share = {*values, *others} <= {0, 1}
    return (paired_proportion if is_share else _difference)(values, others)


def _share(samples: Sequence[Any]) -> Estimate:
    right, starts, covers = zip(*samples, strict=True)
    return proportion(sum(right), len(right), independent_stretches(starts, covers[0]))


def _share_difference(samples: Sequence[Any], others: Sequence[Any]) -> Estimate:
    right, starts, covers = zip(*samples, strict=True)
    theirs = [other for other, *_ in others]
    return paired_proportion(right, theirs, independent_stretches(starts, covers[0]))


def _ratio_difference(values: Sequence[Any], others: Sequence[Any]) -> Estimate:
    pairs = zip(values, others, strict=True)
    return ratio([(top - other, bottom) for (top, bottom), (other, _) in pairs])


# Scores: a share if all are 0 or 1, else a mean, whose interval is from 0 to 1 if all scores are.
SCORE = Quantity(_score, _score_difference)
# Right (1) or wrong (0), with the stretch of text that was read: see `independent_stretches`.
SHARE_OF_STRETCHES = Quantity(_share, _share_difference)
MEAN = Quantity(mean, _difference)
# Pairs of numerator and denominator, such as bits and bytes; both models have the denominators.
RATIO = Quantity(ratio, _ratio_difference)
