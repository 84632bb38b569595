"""The criterion of robust forgetting (arXiv 2410.07145)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from longrnn.evaluation.perplexity import STRETCH, curve
from longrnn.results import Row

# Number of stretches inside the training length, if it is long enough.
INSIDE = 8
FACTOR = 2.0


class Forgetting(NamedTuple):
    """Losses that the criterion of robust forgetting compares.

    Attributes:
        robust: whether `beyond` is at most FACTOR · `inside`.
        width: tokens of the stretches that are compared.
        inside: the largest mean loss of a stretch inside the training length, in nats.
        inside_at: where that stretch begins.
        beyond: the largest mean loss of the other stretches.
        beyond_at: where that stretch begins.
    """

    robust: bool
    width: int
    inside: float
    inside_at: int
    beyond: float
    beyond_at: int


def forgetting(rows: Sequence[Row], train_length: int) -> Forgetting | None:
    """Evaluate the criterion of robust forgetting on the rows of `perplexity.evaluate`.

    The published criterion: on long prompts the loss by position never exceeds 2 × the maximum
    inside the training length. Compared are mean losses, over all windows, of stretches of
    consecutive positions. A stretch is an eighth of the training length, rounded down to a multiple
    of STRETCH = 64 tokens, and at least that. Stretches that end within the training length are
    inside (at least the first one), and all others are beyond. NaN counts as an infinite loss.

    Args:
        rows: all of one length.
        train_length: in tokens.

    Returns:
        None if no stretch lies beyond the training length.
    """
    width = max(STRETCH, train_length // INSIDE // STRETCH * STRETCH)
    stretches = curve(rows, width)
    count = max(1, train_length // width)
    inside, beyond = stretches[:count], stretches[count:]
    if rows[0]["length"] <= train_length or not beyond:
        return None

    def size(stretch: tuple[int, float]) -> float:
        return math.inf if math.isnan(stretch[1]) else stretch[1]

    (inside_at, most), (beyond_at, worst) = max(inside, key=size), max(beyond, key=size)
    robust = worst <= FACTOR * most < math.inf
    return Forgetting(robust, width, most, inside_at, worst, beyond_at)
