"""What a family of models can forget and recall, by the size of its state (arXiv 2410.07145).

Everything comes from evaluations that were recorded. Two numbers of every state size:

- T_forget, the smallest training length from which on every model that was tried forgets robustly:
  on long prompts its loss by position never exceeds 2 × the largest inside the training length
  (`longrnn.evaluation.forgetting`). A shorter one that happens to pass below one that
  does not is no capacity.
- T_recall, the longest context with a passkey accuracy above 95 %, of the best model of the size.

Notable choices:
- The size of a state counts its numbers: those that `longrnn diagnose states` looks at, which are
  the matrices of Mamba-2 and the vectors c of an LSTM and h of a GRU or RNN, over all layers; what
  a convolution remembers is left out.
- A number that lies at the end of what was tried is a bound (T_forget ≤ the shortest training
  length tried; T_recall ≥ the longest prompt asked), and a fit leaves it out.
- The published forms are fitted, T_forget = a · N + b and T_recall = a · (c^N − 1) + b, in tokens
  and with N in thousands of numbers. A form is fitted where there are LEAST points for it.
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
# Points for a form: one more than it has parameters, and never fewer than three.
LEAST = {"line": 3, "exponential": 4}
FORMS = {"line": "a · N + b", "exponential": "a · (c^N − 1) + b"}


class Recorded(NamedTuple):
    """Rows of evaluations by the fingerprint of the model."""

    perplexity: dict[str, list[Row]]
    passkey: dict[str, list[Row]]


class Member(NamedTuple):
    """One model of the family, with what was recorded of it.

    Attributes:
        name: of the checkpoint.
        fingerprint: of the model.
        state_size: numbers in its state.
        train_length: in tokens.
        robust: whether it forgets robustly; None where no loss beyond the training length is known.
        beyond: its largest loss beyond the training length over its largest inside.
        recalled: the longest prompt with an accuracy above RECALLED; 0 for none, None for unknown.
        asked: the longest prompt that was asked.
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
    """A length, or a bound of it: `bound` is "", "≤", "≥" or ">"."""

    value: int
    bound: str

    def __str__(self) -> str:
        return f"{self.bound} {self.value:,}".strip()


class Size(NamedTuple):
    """What is known of a state size; None where nothing was recorded."""

    state_size: int
    forget: Bounded | None
    recall: Bounded | None


class Fit(NamedTuple):
    """A form with its parameters in the order of its letters, and their 95 % intervals.

    `intervals` are Student-t intervals from the covariance of the least-squares fit.
    """

    form: str
    parameters: list[float]
    intervals: list[tuple[float, float]]
    r_squared: float
    n: int

    def at(self, state_size: float) -> float:
        """The fitted length at a state size, in tokens."""
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
    """Rows of every passkey and perplexity evaluation in files, or anywhere in folders.

    Raises:
        UserError: nothing there, or a file that is not a results file.
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
    """One model with what was recorded of it.

    Raises:
        UserError: nothing was.
    """
    losses = recorded.perplexity.get(fingerprint, [])
    answers = recorded.passkey.get(fingerprint, [])
    if not losses and not answers:
        raise UserError(
            f"no evaluation of {name} (fingerprint {fingerprint}) is recorded there: run longrnn "
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
    """The longest prompt with an accuracy above RECALLED, over all places of the key."""
    right: dict[int, list[bool]] = {}
    for row in answers:
        right.setdefault(row["length"], []).append(row["correct"])
    return max((n for n, said in right.items() if sum(said) > RECALLED * len(said)), default=0)


def sizes(members: Sequence[Member]) -> list[Size]:
    """T_forget and T_recall by state size, ascending.

    Raises:
        UserError: fewer than three sizes, of which nothing can be fitted.
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
    """A form through what is known of state sizes, or the reason why there is none.

    Args:
        form: a key of FORMS.
        points: by state size; bounds are left out.
    """
    known = {size: point.value for size, point in points.items() if point and not point.bound}
    if len(known) < LEAST[form]:
        return (
            f"no fit: {len(known)} of {len(points)} state sizes have a length that is no bound, "
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
        return f"no fit: {FORMS[form]} does not settle on these points ({error})"
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
    """Where to start: least squares in a and b, for the best of many c."""
    if form == "line":
        return list(np.polyfit(x, y, 1))

    def loss(rate: float) -> tuple[float, list[float]]:
        columns = np.stack([np.expm1(rate * x), np.ones_like(x)], axis=1)
        (a, b), *_ = np.linalg.lstsq(columns, y, rcond=None)
        return float(((columns @ [a, b] - y) ** 2).sum()), [a, b, math.exp(rate)]

    rates = [sign * 10**power / np.ptp(x) for sign in (1, -1) for power in np.linspace(-2, 1.3, 60)]
    return min(map(loss, rates))[1]
