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


def proportion(right: int, n: int) -> Estimate:
    """A share with its Wilson score interval."""
    interval = stats.binomtest(right, n).proportion_ci(method="wilson")
    return Estimate(right / n, float(interval.low), float(interval.high), n)


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


def paired_mean(values: Sequence[float], others: Sequence[float]) -> Estimate:
    """How far a mean lies above another of the same items, with its Student-t interval."""
    return mean([value - other for value, other in zip(values, others, strict=True)])


def paired_proportion(values: Sequence[float], others: Sequence[float]) -> Estimate:
    """How far a share of right answers lies above another to the same questions.

    The interval is Newcombe's (1998, method 10): it combines the Wilson intervals of the two shares
    by their correlation, and does not shrink to nothing where all answers agree.

    Args:
        values: 1 where right, else 0.
        others: likewise, of the same questions.
    """
    n = len(values)
    pairs = list(zip(values, others, strict=True))
    both, first, second, neither = (
        sum(pair == kind for pair in pairs) for kind in ((1, 1), (1, 0), (0, 1), (0, 0))
    )
    product = (both + first) * (second + neither) * (both + second) * (first + neither)
    excess = both * neither - first * second
    if excess > 0:
        excess = max(excess - n / 2, 0)  # a continuity correction
    phi = excess / math.sqrt(product) if product else 0.0
    a, b = proportion(both + first, n), proportion(both + second, n)

    def width(x: float, y: float) -> float:
        return math.sqrt(max(x * x - 2 * phi * x * y + y * y, 0.0))

    center = a.mean - b.mean
    low = center - width(a.mean - a.low, b.high - b.mean)
    return Estimate(center, low, center + width(a.high - a.mean, b.mean - b.low), n)


def figure(values: Sequence[float]) -> Estimate:
    """One number that was measured once, without an interval."""
    (value,) = values
    return Estimate(value, -math.inf, math.inf, 1)
