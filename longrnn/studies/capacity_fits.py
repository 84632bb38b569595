"""Fits of forgetting and recall capacity by state size, with intervals.

Notable choices:
- The published forms are fitted (arXiv 2410.07145), T_forget = a · N + b and T_recall =
  a · (c^N − 1) + b, in tokens and with N in thousands of entries. Over a wide range of sizes the
  line hangs on the largest one, so T_forget = a · N^b is fitted too, by least squares on the
  logarithms. A form is fitted only to at least LEAST state sizes.
- If the interval of a slope contains 0, `points_to_settle` says how many points would exclude it,
  with the slope and the scatter of those that were measured.
"""

from __future__ import annotations

import math
import warnings
from bisect import bisect_left
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from scipy import optimize, stats

from longrnn.intervals import Estimate
from longrnn.studies.capacity import Bounded, Member

# Minimum number of points for a form: one more than it has parameters.
LEAST = {"line": 3, "power": 3, "exponential": 4}
FORMS = {"line": "a · N + b", "power": "a · N^b", "exponential": "a · (c^N − 1) + b"}
# The forms that are fitted to each length.
FITTED = {"forget": ("line", "power"), "recall": ("exponential",)}
# The parameter that is 0 if the size of the state has no effect.
SLOPES = {"line": 0, "power": 1}
# Probability with which an interval is to exclude 0.
POWER = 0.8
MOST_POINTS = 100_000
# The two slopes and the constant of `ratio_by_size_and_length`.
RATIO_PARAMETERS = 3


class Fit(NamedTuple):
    """A fitted form: parameters in the order of their letters, and their 95 % intervals.

    `intervals` are Student-t intervals from the covariance of the least-squares fit. `r_squared` of
    `power` is that of the logarithms.
    """

    form: str
    parameters: list[float]
    intervals: list[tuple[float, float]]
    r_squared: float
    n: int

    def at(self, state_size: float) -> float:
        """Return the fitted length at a state size, in tokens."""
        return float(FUNCTIONS[self.form](state_size / 1000, *self.parameters))

    def slope(self) -> Estimate | None:
        """Return the parameter that is 0 if the size of the state has no effect."""
        index = SLOPES.get(self.form)
        if index is None:
            return None
        return Estimate(self.parameters[index], *self.intervals[index], self.n)

    def __str__(self) -> str:
        named = ", ".join(
            f"{letter} = {value:.4g} [{low:.4g}, {high:.4g}]"
            for letter, value, (low, high) in zip(
                "abc", self.parameters, self.intervals, strict=False
            )
        )
        return f"{FORMS[self.form]}: {named} (R² {self.r_squared:.3f}, {self.n} points)"


def fit(form: str, points: Sequence[tuple[int, Bounded | None]]) -> Fit | str:
    """Fit a form to lengths by state size; return the reason if that is not possible.

    Args:
        form: a key of FORMS.
        points: state sizes, each with its length; bounds are not used.
    """
    known = [(size, point.value) for size, point in points if point and not point.bound]
    different = len({size for size, _ in known})
    if different < LEAST[form]:
        return (
            f"no fit: {different} of {len({size for size, _ in points})} state sizes have a length "
            f"that is not a bound, and {FORMS[form]} needs {LEAST[form]}"
        )
    x, y = np.array(known, float).T
    x = x / 1000
    if np.ptp(y) == 0:
        return f"no fit: the length is {y[0]:,.0f} at every state size"
    if form == "power":
        line = _least_squares("line", np.log(x), np.log(y))
        assert isinstance(line, Fit)  # a line always has a least-squares fit
        # The line is b · log N + log a.
        (slope, start), (slopes, starts) = line.parameters, line.intervals
        low, high = (math.exp(end) for end in starts)
        return Fit(form, [math.exp(start), slope], [(low, high), slopes], line.r_squared, len(x))
    return _least_squares(form, x, y)


def _least_squares(form: str, x: np.ndarray, y: np.ndarray) -> Fit | str:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", optimize.OptimizeWarning)
            best, covariance = optimize.curve_fit(FUNCTIONS[form], x, y, p0=_guess(form, x, y))
    except (RuntimeError, optimize.OptimizeWarning) as error:
        return f"no fit: {FORMS[form]} does not converge on these points ({error})"
    half = stats.t.ppf(0.975, len(x) - len(best)) * np.sqrt(np.diag(covariance))
    residual = ((y - FUNCTIONS[form](x, *best)) ** 2).sum()
    return Fit(
        form,
        best.tolist(),
        list(zip((best - half).tolist(), (best + half).tolist(), strict=True)),
        float(1 - residual / ((y - y.mean()) ** 2).sum()),
        len(x),
    )


def points_to_settle(slope: Estimate, parameters: int) -> int | None:
    """Return how many points would show that a slope is not 0.

    With as many points, spread as these are, of the same slope and scatter, the 95 % interval
    excludes 0 with a probability of POWER. The standard error falls as 1 / √points.

    Args:
        slope: with its Student-t interval.
        parameters: number of parameters of its fit.

    Returns:
        None if more than MOST_POINTS would be needed.
    """
    error = (slope.high - slope.low) / 2 / stats.t.ppf(0.975, slope.n - parameters)
    ratio = abs(slope.mean) / error / math.sqrt(slope.n)

    def settled(n: int) -> bool:
        free = n - parameters
        needed = stats.t.ppf(0.975, free) + stats.t.ppf(POWER, free)
        return bool(ratio * math.sqrt(n) >= needed)

    least = parameters + 1
    place = bisect_left(range(least, MOST_POINTS + 1), True, key=settled)
    return None if place + least > MOST_POINTS else place + least


def conclusion(slope: Estimate, parameters: int, points: str) -> str:
    """Return in words whether a slope differs from 0, and what would settle it if not.

    Args:
        slope: see `points_to_settle`.
        parameters: see `points_to_settle`.
        points: what a point is, in the plural.
    """
    if slope.low > 0 or slope.high < 0:
        return "the interval excludes 0"
    needed = points_to_settle(slope, parameters)
    enough = f"more than {MOST_POINTS:,}" if needed is None else f"about {needed:,}"
    return (
        f"the interval contains 0; with this slope and scatter, {enough} {points} would exclude it "
        f"with a probability of {POWER:.0%}, and there are {slope.n}"
    )


class Ratio(NamedTuple):
    """The fit of log2(loss beyond / loss inside), by least squares over all models.

    Attributes:
        by_state: change per doubling of the state.
        by_length: change per doubling of the training length.
    """

    by_state: Estimate
    by_length: Estimate


def ratio_by_size_and_length(members: Sequence[Member]) -> Ratio | str:
    """Fit the loss beyond relative to that inside by state size and training length.

    T_forget uses of every model only on which side of FACTOR it is. This uses the ratios themselves
    and separates both influences, because most sizes were trained at several lengths. Intervals are
    Student-t.

    Returns:
        The reason if there are too few models for a fit.
    """
    known = [one for one in members if one.beyond is not None and 0 < one.beyond < math.inf]
    design = np.array([[1.0, math.log2(m.state_size), math.log2(m.train_length)] for m in known])
    degrees = len(known) - RATIO_PARAMETERS
    if degrees < 1 or np.linalg.matrix_rank(design) < RATIO_PARAMETERS:
        return "no fit of the ratio: it needs four models of different state sizes and lengths"
    y = np.log2([one.beyond or math.nan for one in known])
    best, *_ = np.linalg.lstsq(design, y, rcond=None)
    variance = ((y - design @ best) ** 2).sum() / degrees
    errors = np.sqrt(np.diag(np.linalg.inv(design.T @ design)) * variance)
    half = stats.t.ppf(0.975, degrees) * errors
    state, length = (
        Estimate(float(best[k]), float(best[k] - half[k]), float(best[k] + half[k]), len(known))
        for k in (1, 2)
    )
    return Ratio(state, length)


def _line(x: np.ndarray, a: float, b: float) -> np.ndarray:
    return a * x + b


def _exponential(x: np.ndarray, a: float, b: float, c: float) -> np.ndarray:
    return a * np.expm1(x * math.log(max(c, 1e-12))) + b


def _power(x: np.ndarray, a: float, b: float) -> np.ndarray:
    return a * x**b


FUNCTIONS = {"line": _line, "power": _power, "exponential": _exponential}


def _guess(form: str, x: np.ndarray, y: np.ndarray) -> list[float]:
    """Return initial parameters: least squares in a and b, for the best of many c."""
    if form == "line":
        return list(np.polyfit(x, y, 1))

    def loss(rate: float) -> tuple[float, list[float]]:
        columns = np.stack([np.expm1(rate * x), np.ones_like(x)], axis=1)
        (a, b), *_ = np.linalg.lstsq(columns, y, rcond=None)
        return float(((columns @ [a, b] - y) ** 2).sum()), [a, b, math.exp(rate)]

    rates = [sign * 10**power / np.ptp(x) for sign in (1, -1) for power in np.linspace(-2, 1.3, 60)]
    return min(map(loss, rates))[1]
