"""Computes forgetting and recall capacity by state size from recorded evaluations.

Two lengths for every state size (arXiv 2410.07145):

- T_forget, the smallest training length from which on all models that were tried forget robustly:
  on long prompts the loss by position never exceeds 2 × the largest inside the training length
  (`longrnn.evaluation.forgetting`). A model that passes while one with a greater training length
  fails does not count.
- T_recall, the longest context with a passkey accuracy above 95 %, of the best model of the size.

Notable choices:
- The size of a state is the number of its entries in `longrnn diagnose states`: the matrices of
  Mamba-2 and the vectors c of an LSTM and h of a GRU or RNN, over all layers, without convolution
  inputs.
- A length at the end of the range that was tried is a bound (T_forget ≤ the shortest training
  length; T_recall ≥ the longest prompt) and is not used in fits.
- The published forms are fitted, T_forget = a · N + b and T_recall = a · (c^N − 1) + b, in tokens
  and with N in thousands of entries. A form is fitted only to at least LEAST points.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
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
LEAST = {"line": 3, "exponential": 4}
FORMS = {"line": "a · N + b", "exponential": "a · (c^N − 1) + b"}


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
        robust: whether it forgets robustly; None if no loss beyond the training length is recorded.
        beyond: its largest loss beyond the training length relative to its largest inside.
        recalled: the longest prompt with an accuracy above RECALLED; 0 for none, None for unknown.
        asked: the longest prompt that was evaluated.
    """

    name: str
    fingerprint: str
    state_size: int
    train_length: int
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
    """Both lengths for a state size; None if there are no results."""

    state_size: int
    forget: Bounded | None
    recall: Bounded | None


class Fit(NamedTuple):
    """A fitted form: parameters in the order of their letters, and their 95 % intervals.

    `intervals` are Student-t intervals from the covariance of the least-squares fit.
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
        return f"{FORMS[self.form]}: {named} (R² {self.r_squared:.3f}, {self.n} sizes)"


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
    name: str, fingerprint: str, state_size: int, train_length: int, recorded: Recorded
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
    """Return T_forget and T_recall by state size, ascending.

    Raises:
        UserError: there are fewer than three sizes, too few for a fit.
    """
    of_size: dict[int, list[Member]] = {}
    for one in sorted(members, key=lambda one: (one.state_size, one.train_length)):
        of_size.setdefault(one.state_size, []).append(one)
    if len(of_size) < min(LEAST.values()):
        raise UserError(
            f"these models have {len(of_size)} different state sizes and a fit needs "
            f"{min(LEAST.values())}: give a family such as that of configs/train/capacity.yaml"
        )
    return [Size(size, _forget(family), _recall(family)) for size, family in of_size.items()]


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


def fit(form: str, points: Mapping[int, Bounded | None]) -> Fit | str:
    """Fit a form to lengths by state size; return the reason if that is not possible.

    Args:
        form: a key of FORMS.
        points: lengths by state size; bounds are not used.
    """
    known = {size: point.value for size, point in points.items() if point and not point.bound}
    if len(known) < LEAST[form]:
        return (
            f"no fit: {len(known)} of {len(points)} state sizes have a length that is not a bound, "
            f"and {FORMS[form]} needs {LEAST[form]}"
        )
    x, y = np.array(list(known), float) / 1000, np.array(list(known.values()), float)
    if np.ptp(y) == 0:
        return f"no fit: the length is {y[0]:,.0f} at every state size"
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


def _line(x: np.ndarray, a: float, b: float) -> np.ndarray:
    return a * x + b


def _exponential(x: np.ndarray, a: float, b: float, c: float) -> np.ndarray:
    return a * np.expm1(x * math.log(max(c, 1e-12))) + b


FUNCTIONS = {"line": _line, "exponential": _exponential}


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
