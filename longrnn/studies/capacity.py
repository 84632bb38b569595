"""Computes forgetting and recall capacity by state size from recorded evaluations.

Two lengths for every state size and seed (arXiv 2410.07145):

- T_forget, the smallest training length from which on all models that were tried forget robustly:
  on long prompts the loss by position never exceeds 2 × the largest inside the training length
  (`longrnn.evaluation.forgetting`). A model that passes while one with a greater training length
  fails does not count.
- T_recall, the longest context with a passkey accuracy above 95 %, of the best model of the size.

Models of one seed are a family, and every family has a length for each of its state sizes: the
scatter between seeds is what the intervals of a fit are made of.

Notable choices:
- The size of a state is the number of its entries in `longrnn diagnose states`: the matrices of
  Mamba-2 and the vectors c of an LSTM and h of a GRU or RNN, over all layers, without convolution
  inputs.
- A length at the end of the range that was tried is a bound (T_forget ≤ the shortest training
  length; T_recall ≥ the longest prompt) and is not used in fits.
- The published forms are fitted, T_forget = a · N + b and T_recall = a · (c^N − 1) + b, in tokens
  and with N in thousands of entries. Over a wide range of sizes the line hangs on the largest one,
  so T_forget = a · N^b is fitted too, by least squares on the logarithms. A form is fitted only to
  at least LEAST points.
- If the interval of a slope contains 0, `points_to_settle` says how many points would exclude it,
  with the slope and the scatter of those that were measured.
"""

from __future__ import annotations

import math
import warnings
from bisect import bisect_left
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from scipy import optimize, stats

from longrnn.errors import UserError
from longrnn.evaluation.forgetting import forgetting
from longrnn.evaluation.passkey import by_model
from longrnn.results import Row, read_results

RECALLED = 0.95
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


class Recorded(NamedTuple):
    """Rows of evaluations by the fingerprint of the model."""

    perplexity: dict[str, list[Row]]
    passkey: dict[str, list[Row]]


class Member(NamedTuple):
    """One model of the family, with its recorded results.

    Attributes:
        name: name of the checkpoint.
        fingerprint: fingerprint of the model.
        state_size: number of entries in its state.
        train_length: in tokens.
        seed: of the training.
        robust: whether it forgets robustly; None if no loss beyond the training length is recorded.
        beyond: its largest loss beyond the training length relative to its largest inside.
        recalled: the longest prompt with an accuracy above RECALLED; 0 for none, None for unknown.
        asked: the longest prompt that was evaluated.
    """

    name: str
    fingerprint: str
    state_size: int
    train_length: int
    seed: int
    robust: bool | None
    beyond: float | None
    recalled: int | None
    asked: int | None


class Bounded(NamedTuple):
    """A length or a bound on it: `bound` is "", "≤", "≥" or ">"."""

    value: int
    bound: str

    def __str__(self) -> str:
        return f"{self.bound} {self.value:,}".strip()


class Size(NamedTuple):
    """Both lengths for a state size and seed; None if there are no results."""

    state_size: int
    seed: int
    forget: Bounded | None
    recall: Bounded | None


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

    def __str__(self) -> str:
        named = ", ".join(
            f"{letter} = {value:.4g} [{low:.4g}, {high:.4g}]"
            for letter, value, (low, high) in zip(
                "abc", self.parameters, self.intervals, strict=False
            )
        )
        return f"{FORMS[self.form]}: {named} (R² {self.r_squared:.3f}, {self.n} points)"


def read_recorded(paths: Sequence[Path]) -> Recorded:
    """Read the rows of all passkey and perplexity evaluations in files and folders.

    Raises:
        UserError: there are none, or a file is not a results file.
    """
    files: list[Path] = []
    for path in paths:
        if not path.is_dir() and not path.is_file():
            raise UserError(f"no results at {path}: give files or folders of recorded evaluations")
        files += sorted(path.rglob("*.jsonl")) if path.is_dir() else [path]
    found = Recorded({}, {})
    for file in files:
        header, rows = read_results(file)
        if header.get("evaluation") == "perplexity":
            found.perplexity.setdefault(header["model"], []).extend(rows)
        if header.get("evaluation") == "passkey" and "chunk_select" not in header:
            split = by_model(rows)
            for name, fingerprint in header["models"].items():
                found.passkey.setdefault(fingerprint, []).extend(split.get(name, []))
    if not found.perplexity and not found.passkey:
        raise UserError(
            f"{', '.join(map(str, paths))} holds no passkey or perplexity evaluation: "
            "run longrnn eval first, or give its folder"
        )
    return found


def member(
    name: str, fingerprint: str, state_size: int, train_length: int, seed: int, recorded: Recorded
) -> Member:
    """Return one model with its recorded results.

    Raises:
        UserError: there are none.
    """
    losses = recorded.perplexity.get(fingerprint, [])
    answers = recorded.passkey.get(fingerprint, [])
    if not losses and not answers:
        raise UserError(
            f"no recorded evaluation of {name} (fingerprint {fingerprint}): run longrnn "
            "eval perplexity and longrnn eval passkey on it, or leave it out"
        )
    longest = max((row["length"] for row in losses), default=0)
    judged = None
    if losses:
        judged = forgetting([row for row in losses if row["length"] == longest], train_length)
    return Member(
        name,
        fingerprint,
        state_size,
        train_length,
        seed,
        None if judged is None else judged.robust,
        None if judged is None else judged.beyond / judged.inside,
        _recalled(answers) if answers else None,
        max((row["length"] for row in answers), default=None),
    )


def _recalled(answers: Sequence[Row]) -> int:
    """Return the longest prompt with an accuracy above RECALLED, over all positions of the key."""
    right: dict[int, list[bool]] = {}
    for row in answers:
        right.setdefault(row["length"], []).append(row["correct"])
    return max((n for n, all_ in right.items() if sum(all_) > RECALLED * len(all_)), default=0)


def sizes(members: Sequence[Member]) -> list[Size]:
    """Return T_forget and T_recall by state size and seed, ascending.

    Raises:
        UserError: there are fewer than three sizes, too few for a fit.
    """
    families: dict[tuple[int, int], list[Member]] = {}
    for one in sorted(members, key=lambda one: (one.state_size, one.seed, one.train_length)):
        families.setdefault((one.state_size, one.seed), []).append(one)
    different = {size for size, _ in families}
    if len(different) < min(LEAST.values()):
        raise UserError(
            f"these models have {len(different)} different state sizes and a fit needs "
            f"{min(LEAST.values())}: give a family such as that of scripts/study_capacity.py"
        )
    return [Size(*key, _forget(family), _recall(family)) for key, family in families.items()]


def _forget(family: Sequence[Member]) -> Bounded | None:
    judged = [one.train_length for one in family if one.robust is not None]
    failing = [one.train_length for one in family if one.robust is False]
    if not judged:
        return None
    enough = [length for length in judged if length > max(failing, default=0)]
    if not enough:
        return Bounded(max(judged), ">")
    return Bounded(min(enough), "" if failing else "≤")


def _recall(family: Sequence[Member]) -> Bounded | None:
    asked = [one for one in family if one.recalled is not None and one.asked is not None]
    if not asked:
        return None
    best = max(asked, key=lambda one: one.recalled or 0)
    if not best.recalled:
        return None
    return Bounded(best.recalled, "≥" if best.recalled == best.asked else "")


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


def points_to_settle(fitted: Fit) -> int | None:
    """Return how many points would show that a slope is not 0.

    With as many points, spread over the sizes as these are, of the same slope and scatter, the 95 %
    interval excludes 0 with a probability of POWER. The standard error falls as 1 / √points.

    Args:
        fitted: a form with a slope, see SLOPES.

    Returns:
        None if more than MOST_POINTS would be needed.
    """
    index = SLOPES[fitted.form]
    low, high = fitted.intervals[index]
    degrees = fitted.n - len(fitted.parameters)
    error = (high - low) / 2 / stats.t.ppf(0.975, degrees)
    ratio = abs(fitted.parameters[index]) / error / math.sqrt(fitted.n)

    def settled(n: int) -> bool:
        free = n - len(fitted.parameters)
        needed = stats.t.ppf(0.975, free) + stats.t.ppf(POWER, free)
        return bool(ratio * math.sqrt(n) >= needed)

    least = len(fitted.parameters) + 1
    place = bisect_left(range(least, MOST_POINTS + 1), True, key=settled)
    return None if place + least > MOST_POINTS else place + least


def conclusion(fitted: Fit) -> str:
    """Return in words whether a slope differs from 0, and what would settle it if not."""
    letter = "abc"[SLOPES[fitted.form]]
    low, high = fitted.intervals[SLOPES[fitted.form]]
    if low > 0 or high < 0:
        return f"the interval of {letter} excludes 0"
    needed = points_to_settle(fitted)
    enough = f"more than {MOST_POINTS:,}" if needed is None else f"about {needed:,}"
    return (
        f"the interval of {letter} contains 0; with this slope and scatter, {enough} points "
        f"(state sizes × seeds) would exclude it with a probability of {POWER:.0%}, and there are "
        f"{fitted.n}"
    )


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
