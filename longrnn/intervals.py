"""Intervals for what was measured on samples."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from scipy import stats

RESAMPLES = 10_000


class Estimate(NamedTuple):
    """A mean with its 95 % interval over `n` samples."""

    mean: float
    low: float
    high: float
    n: int

    def __str__(self) -> str:
        return f"{self.mean:.2f} [{self.low:.2f}, {self.high:.2f}]"


def proportion(right: int, n: int, independent: float | None = None) -> Estimate:
    """A share with its Wilson score interval.

    Args:
        right: right answers.
        n: questions.
        independent: how many of the questions count as independent; None for all. The interval is
            that of as many questions with the same share.
    """
    size = _counted(n, independent)
    share, z = right / n, float(stats.norm.ppf(0.975))
    center = (share + z**2 / (2 * size)) / (1 + z**2 / size)
    half = z / (1 + z**2 / size) * math.sqrt(share * (1 - share) / size + z**2 / (4 * size**2))
    return Estimate(share, max(center - half, 0.0), min(center + half, 1.0), n)


def independent_stretches(starts: Sequence[float], covers: float) -> float:
    """Counts the stretches of one text that share nothing, as a number for an interval.

    Stretches that read the same text do not say the same twice about texts of its kind. What all
    of them cover together, over what one of them covers, is how many stretches without a common
    token would have read as much. This is conservative: it gives no credit for the different keys
    that are asked in one stretch.

    Args:
        starts: where each begins, as shares of a text that is read in a circle.
        covers: what each reads, as a share of the text; more than 1 where it repeats.

    Returns:
        From 1 to the number of different starts.
    """
    places = sorted({start % 1.0 for start in starts})
    gaps = [b - a for a, b in zip(places, [*places[1:], places[0] + 1.0], strict=True)]
    covered = sum(min(gap, covers) for gap in gaps)
    return max(covered / covers, 1.0)


def _counted(n: int, independent: float | None) -> float:
    """How many of n questions an interval counts."""
    return n if independent is None else min(independent, n)


def ratio(numerators: Sequence[float], denominators: Sequence[float]) -> Estimate:
    """Σ numerators / Σ denominators with its bootstrap interval over the pairs.

    The 2.5 and 97.5 percentiles of RESAMPLES draws with replacement, always the same ones; of one
    pair, the interval is infinite.
    """
    top, bottom = np.asarray(numerators, float), np.asarray(denominators, float)
    n = len(top)
    center = float(top.sum() / bottom.sum())
    if n == 1:
        return Estimate(center, -math.inf, math.inf, 1)
    counts = np.random.default_rng(0).multinomial(n, np.full(n, 1 / n), size=RESAMPLES)
    low, high = np.quantile((counts @ top) / (counts @ bottom), [0.025, 0.975])
    return Estimate(center, float(low), float(high), n)


def ratio_mean(numerators: Sequence[float], denominators: Sequence[float]) -> Estimate:
    """Σ numerators / Σ denominators with its Student-t interval over the pairs.

    The variance is that of the linearised ratio (Cochran, Sampling Techniques, 1977, section 6.4).
    With equal denominators it is `mean` of the quotients; of one pair, the interval is infinite.
    """
    center = sum(numerators) / sum(denominators)
    size = sum(denominators) / len(denominators)
    pairs = zip(numerators, denominators, strict=True)
    return mean([center + (top - center * bottom) / size for top, bottom in pairs])


def mean(values: Sequence[float]) -> Estimate:
    """A mean with its Student-t interval; of one value, the interval is infinite."""
    n = len(values)
    center = sum(values) / n
    if n == 1:
        return Estimate(center, -math.inf, math.inf, 1)
    deviation = math.sqrt(sum((value - center) ** 2 for value in values) / (n - 1))
    half = float(stats.t.ppf(0.975, n - 1)) * deviation / math.sqrt(n)
    return Estimate(center, center - half, center + half, n)


def share_or_mean(values: Sequence[float]) -> Estimate:
    """A mean, with Wilson's interval if all values are 0 or 1, else with Student's t."""
    if set(values) <= {0, 1}:
        return proportion(round(sum(values)), len(values))
    return mean(values)


def paired_share_or_mean(values: Sequence[float], others: Sequence[float]) -> Estimate:
    """How far a mean lies above another of the same items; see `share_or_mean`."""
    if {*values, *others} <= {0, 1}:
        return paired_proportion(values, others)
    return paired_mean(values, others)


def paired_mean(values: Sequence[float], others: Sequence[float]) -> Estimate:
    """How far a mean lies above another of the same items, with its Student-t interval."""
    return mean([value - other for value, other in zip(values, others, strict=True)])


def paired_proportion(
    values: Sequence[float], others: Sequence[float], independent: float | None = None
) -> Estimate:
    """How far a share of right answers lies above another to the same questions.

    The interval is Newcombe's (1998, method 10): it combines the Wilson intervals of the two shares
    by their correlation, and does not shrink to nothing where all answers agree.

    Args:
        values: 1 where right, else 0.
        others: likewise, of the same questions.
        independent: how many of the questions count as independent; None for all.
    """
    n = len(values)
    size = _counted(n, independent)
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


def figure(values: Sequence[float]) -> Estimate:
    """One number that was measured once, without an interval."""
    (value,) = values
    return Estimate(value, -math.inf, math.inf, 1)
