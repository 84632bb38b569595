"""The criterion of robust forgetting (arXiv 2410.07145)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

# Number of stretches inside the training length, if it is long enough; tokens of the shortest.
INSIDE, STRETCH = 8, 64
FACTOR = 2.0


class Forgetting(NamedTuple):
    """Losses that the criterion of robust forgetting compares.

    Attributes:
        robust: whether `beyond` is at most FACTOR · `inside`.
        width: tokens of the stretches that are compared.
        inside: the largest mean loss of a stretch inside the training length, in nats.
        beyond: the largest mean loss of the other stretches.
        beyond_at: where that stretch begins.
    """

    robust: bool
    width: int
    inside: float
    beyond: float
    beyond_at: int

    def sentence(self, trained: int, vocab_size: int) -> str:
        """Return the verdict with its numbers in words."""
        said = (
            f"Forgets robustly: {'yes' if self.robust else 'no'}. Beyond the training length of "
            f"{trained:,} the loss reaches {self.beyond:.3f} nats (from position "
            f"{self.beyond_at:,}), {self.beyond / self.inside:.2f} × its largest inside "
            f"({self.inside:.3f}); at most {FACTOR:g} × is robust. Means over stretches of "
            f"{self.width} tokens and all windows."
        )
        if self.inside > math.log(vocab_size):
            said += (
                " This says little, because the loss inside is above that of a uniform guess: the "
                "text is unlike the training text."
            )
        return said


def forgetting(
    rows: Sequence[tuple[Sequence[int], Sequence[float]]], train_length: int
) -> Forgetting | None:
    """Evaluate the criterion of robust forgetting.

    The published criterion: on long prompts the loss by position never exceeds 2 × the maximum
    inside the training length. Compared are mean losses, over all windows, of stretches of
    consecutive positions. A stretch is an eighth of the training length, rounded down to a multiple
    of STRETCH tokens, and at least that. Stretches that end within the training length are inside
    (at least the first one), and all others are beyond. NaN counts as an infinite loss.

    Args:
        rows: for each window the edges of its parts, and the sum of the loss in each; all windows
            have one length, and every multiple of STRETCH below it is an edge.
        train_length: in tokens.

    Returns:
        None if no stretch lies beyond the training length, or stretches are not known.
    """
    edges = list(rows[0][0])
    width = max(STRETCH, train_length // INSIDE // STRETCH * STRETCH)
    # The remainder at the end is part of the last stretch.
    starts = range(0, edges[-1] - width + 1, width)
    count = max(1, train_length // width)
    if len(starts) <= count or edges[-1] <= train_length or not set(starts) <= set(edges):
        return None
    total = np.sum([nats for _, nats in rows], axis=0)
    sums = np.add.reduceat(total, [edges.index(start) for start in starts])
    means = sums / len(rows) / np.diff([*starts, edges[-1]])
    means[np.isnan(means)] = math.inf
    inside, beyond = float(means[:count].max()), float(means[count:].max())
    return Forgetting(
        beyond <= FACTOR * inside < math.inf,
        width,
        inside,
        beyond,
        starts[count + int(means[count:].argmax())],
    )
