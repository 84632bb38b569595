"""The criterion of robust forgetting (arXiv 2410.07145)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

# Number of stretches inside the training length, if it is long enough; tokens of the shortest.
INSIDE, STRETCH = 8, 64
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

    def sentence(self, trained: int, vocab_size: int) -> str:
        """Return the verdict with its numbers in words."""
        said = (
            f"Forgets robustly: {'yes' if self.robust else 'no'}. Beyond the training length of "
            f"{trained:,} the loss reaches {self.beyond:.3f} nats (from position "
            f"{self.beyond_at:,}), {self.beyond / self.inside:.2f} × its largest inside "
            f"({self.inside:.3f}, from position {self.inside_at:,}); at most {FACTOR:g} × is "
            f"robust. Means over stretches of {self.width} tokens and all windows."
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
    length = rows[0][0][-1]
    width = max(STRETCH, train_length // INSIDE // STRETCH * STRETCH)
    starts = [start for start in range(0, length, width) if start + width <= length]
    if not starts or length <= train_length or not set(starts) <= set(rows[0][0]):
        return None
    count = max(1, train_length // width)
    # The remainder at the end is part of the last stretch.
    stretches = [
        _mean(rows, start, stop) for start, stop in zip(starts, [*starts[1:], length], strict=True)
    ]
    inside, beyond = stretches[:count], stretches[count:]
    if not beyond:
        return None
    most, worst = max(inside), max(beyond)
    return Forgetting(
        worst <= FACTOR * most < math.inf,
        width,
        most,
        starts[inside.index(most)],
        worst,
        starts[count + beyond.index(worst)],
    )


def _mean(rows: Sequence[tuple[Sequence[int], Sequence[float]]], start: int, stop: int) -> float:
    total = 0.0
    for edges, nats in rows:
        total += math.fsum(nats[edges.index(start) : edges.index(stop)])
    found = total / len(rows) / (stop - start)
    return math.inf if math.isnan(found) else found
