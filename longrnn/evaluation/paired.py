"""The difference between the losses of two models on the same text, with an interval.

Notable choices:
- Both models predict the same bytes (see `longrnn.evaluation.windows.shared_windows`), and losses
  are compared in bits per byte, so that the tokenizers may differ.
- The interval is a bootstrap over texts, with all windows of a text drawn together, and generalises
  to similar texts. With fewer than LEAST texts it is a bootstrap over windows, which generalises to
  other windows of these texts only. With fewer than LEAST windows there is no interval.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from longrnn.errors import UserError
from longrnn.evaluation.perplexity import edges, scored
from longrnn.intervals import Estimate, ratio
from longrnn.results import Row

LEAST = 5
UNITS = {
    "texts": "bootstrap over {n} texts",
    "windows": "bootstrap over {n} windows: of these texts alone, fewer than " + f"{LEAST}",
    "none": "no interval: {n} windows",
}


class Difference(NamedTuple):
    """The loss of the second model minus that of the first: negative if the second is better.

    Attributes:
        first: mean of the first model.
        second: mean of the second model.
        estimate: the difference with its interval; `n` counts the units that were drawn.
        unit: the unit of the bootstrap, a key of UNITS.
    """

    first: float
    second: float
    estimate: Estimate
    unit: str

    def basis(self) -> str:
        """Return how the interval was computed, in words."""
        return UNITS[self.unit].format(n=self.estimate.n)


def bits_per_byte(first: Sequence[Row], second: Sequence[Row]) -> Difference:
    """Return the difference in bits per byte of whole windows.

    Args:
        first: rows of `perplexity.evaluate_windows`.
        second: rows of the other model, for windows of the same bytes in the same order.

    Raises:
        UserError: rows of different texts, or without bytes.
    """
    _check(first, second)
    return _difference(first, second, lambda row: scored(row).bits, lambda row: row["bytes"])


def by_position(first: Sequence[Row], second: Sequence[Row]) -> list[Difference]:
    """Return the difference in nats per token for every bucket of `perplexity.edges`.

    Args:
        first: rows of `perplexity.evaluate`, all of one length.
        second: rows of another model with the same tokenizer, for the same windows.

    Raises:
        UserError: rows of different texts, or without bytes.
    """
    _check(first, second)
    count = len(edges(first[0]["length"])) - 1
    return [
        _difference(first, second, lambda row, k=k: row["buckets"][k], lambda row: 1)
        for k in range(count)
    ]


def _check(first: Sequence[Row], second: Sequence[Row]) -> None:
    for row, other in zip(first, second, strict=True):
        same = all(row[name] == other[name] for name in ("text_sha256", "window", "bytes"))
        if not same or row["bytes"] is None:
            raise UserError(
                f"window {row['window']} of {row['text']} is not the same text for both models: "
                "measure them together"
            )


def _difference(
    first: Sequence[Row],
    second: Sequence[Row],
    amount: Callable[[Row], float],
    size: Callable[[Row], float],
) -> Difference:
    """Return the difference of Σ amount / Σ size over rows."""
    total = sum(map(size, first))
    means = [sum(map(amount, rows)) / total for rows in (first, second)]
    texts = list(dict.fromkeys(row["text_sha256"] for row in first))
    unit = "texts" if len(texts) >= LEAST else "windows" if len(first) >= LEAST else "none"
    groups = texts if unit == "texts" else range(len(first))
    place = {group: index for index, group in enumerate(groups)}
    less, sizes = [0.0] * len(place), [0.0] * len(place)
    for index, (row, other) in enumerate(zip(first, second, strict=True)):
        at = place[row["text_sha256"] if unit == "texts" else index]
        less[at] += amount(other) - amount(row)
        sizes[at] += size(row)
    estimate = ratio(less, sizes)
    if unit == "none":
        estimate = estimate._replace(low=-math.inf, high=math.inf)
    return Difference(means[0], means[1], estimate, unit)
