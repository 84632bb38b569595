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


def mean(values: Sequence[float]) -> Estimate:
    """A mean with its Student-t interval; of one value, the interval is infinite."""
    n = len(values)
    center = sum(values) / n
    if n == 1:
        return Estimate(center, -math.inf, math.inf, 1)
    deviation = math.sqrt(sum((value - center) ** 2 for value in values) / (n - 1))
    half = float(stats.t.ppf(0.975, n - 1)) * deviation / math.sqrt(n)
    return Estimate(center, center - half, center + half, n)
