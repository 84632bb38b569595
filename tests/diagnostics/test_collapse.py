"""The criterion of collapse on synthetic statistics."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch

from longrnn.diagnostics.collapse import CollapseDetector, Finding
from longrnn.diagnostics.record import HeadStatistics

ENTRIES, TRAINED, LENGTH, EVERY = 64, 1024, 32768, 64


def detector(norm: Callable[[int], float], mean: Callable[[int], float] = lambda t: 0.0) -> Finding:
    """Return one head whose state has this norm and mean at position t."""
    one = CollapseDetector(TRAINED, layers=1, prompts=["text"], heads=1)
    for position in range(EVERY, LENGTH + 1, EVERY):
        square = norm(position) ** 2 / ENTRIES
        values = (mean(position), max(square - mean(position) ** 2, 0.0), norm(position))
        first, second, third = (torch.full((1, 1), value, dtype=torch.float64) for value in values)
        one.see(position, [HeadStatistics(first, second, third, first, first, first[0])])
    (finding,) = one.findings()
    return finding


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("memory", [1, 300])
def test_a_stationary_head_does_not_collapse(seed: int, memory: int) -> None:
    """A stationary random head, a decaying sum over `memory` tokens, does not collapse."""
    randomness = np.random.default_rng(seed)
    keep = math.exp(-EVERY / memory)
    state, norms, means = np.zeros(ENTRIES), {}, {}
    for position in range(EVERY, LENGTH + 1, EVERY):
        added = randomness.standard_normal(ENTRIES) * randomness.gamma(1.0)
        state = keep * state + math.sqrt(1 - keep**2) * added
        norms[position], means[position] = float(np.linalg.norm(state)), float(state.mean())
    assert detector(norms.__getitem__, means.__getitem__).left == ()


@pytest.mark.parametrize(("retention", "collapses"), [(0.2, False), (0.5, True), (0.99, True)])
def test_a_head_that_fills_up(retention: float, collapses: bool) -> None:
    """A state that fills as 1 − exp(−t/τ) collapses from a retention of a third on."""
    rate = -math.log(retention) / TRAINED
    found = detector(lambda t: 1 - math.exp(-rate * t))
    assert bool(found.left) == collapses
    if collapses:
        assert found.left == ("deviation", "norm")
        assert found.onset is not None
        level = 1.5 * (1 - retention)
        passed = -math.log(1 - level) / rate
        assert found.onset == pytest.approx(passed, abs=EVERY)
        assert found.growth == pytest.approx(
            (1 - math.exp(-rate * LENGTH)) / (1 - retention), rel=1e-6
        )


def test_a_passing_excursion_is_no_collapse() -> None:
    """A single outlier is no collapse; leaving the range for the rest of the prompt is."""
    assert detector(lambda t: 9.0 if 8192 < t <= 16384 else 1.0).left == ()
    assert detector(lambda t: 9.0 if t > 20000 else 1.0).left == ()
    found = detector(lambda t: 9.0 if t > 12000 else 1.0)
    assert found.left == ("deviation", "norm")
    assert found.onset == 12032
    assert found.growth == 9


def test_the_mean_is_judged_beside_the_entries() -> None:
    """A mean collapses if it is large relative to the entries, not if it only multiplies."""
    size = 8.0  # the norm of 64 entries of size 1
    assert detector(lambda t: size, lambda t: 0.3 if t > TRAINED else 0.1).left == ()
    found = detector(lambda t: size, lambda t: -0.9 if t > TRAINED else 0.1)
    assert found.left == ("mean",)


def test_states_that_shrink_or_stay_zero() -> None:
    """A head whose state becomes or stays zero does not collapse."""
    assert detector(lambda t: 1.0 if t <= TRAINED else 1e-6).left == ()
    assert detector(lambda t: 0.0).left == ()


@pytest.mark.parametrize("start", [500, 2000])
def test_no_number_is_outside(start: int) -> None:
    """NaN counts as outside the range."""
    assert "norm" in detector(lambda t: math.nan if t > start else 1.0).left
    assert "norm" in detector(lambda t: math.inf if t > 2000 else 1.0).left
