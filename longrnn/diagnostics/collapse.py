"""The criterion of state collapse: statistics that leave their range inside the training length.

At every measured position, the entries of a head's state have a mean, a standard deviation
(√variance) and a Frobenius norm. Inside the training length each of the three has a range, which
includes the zero state at the start. A head collapses if, for one of the three, more than half of
the measurements beyond the training length of the same prompt lie outside that range, widened on
both sides: for deviation and norm by MARGIN of its width, so that they must exceed 1.5 × their
largest value inside; for the mean by MARGIN of the largest root mean square of the entries inside,
because changes of a mean that is small relative to the entries are not significant.

A stationary head stays inside: more than half of its measurements are near its median, which is not
above 1.5 × the largest value inside. A head that still fills up at the training length, as
1 − exp(−t/τ), leaves its range if it retains more than a third of its state over the training
length.

A head is global if its retention over the training length exceeds GLOBAL on any of the prompts (the
criterion of arXiv 2504.16053).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import product
from typing import NamedTuple

import torch
from torch import Tensor

from longrnn.diagnostics.record import HeadStatistics

MARGIN = 0.5
GLOBAL = 0.05
STATISTICS = ("mean", "deviation", "norm")
CRITERION = (
    "A head collapses where the mean, the standard deviation or the norm of its state lies, at "
    "more than half of the readings beyond the training length of the same prompt, outside its "
    "range inside the training length (the zero state at the start included). Outside means: "
    f"deviation or norm above {1 + MARGIN:g} × the largest inside; mean farther than {MARGIN:g} × "
    "the largest root mean square of the entries inside from the range of the mean."
)


class Finding(NamedTuple):
    """The result for one head on one prompt.

    Attributes:
        left: the statistics that left their range; the head collapses if there is one.
        onset: the first position beyond the training length at which one of these was outside.
        growth: the norm at the end relative to its largest value inside the training length.
        retention: over the training length; None if it is not defined.
        first_share: at the end; None if it is not defined.
    """

    layer: int
    head: int
    prompt: str
    left: tuple[str, ...]
    onset: int | None
    growth: float
    retention: float | None
    first_share: float | None


class CollapseDetector:
    """Detects which statistics of which heads leave their ranges.

    Memory does not grow with the length: only the ranges inside the training length and the number
    of measurements outside of them are kept.

    Args:
        train_length: in tokens.
        layers: number of layers.
        prompts: names of the rows.
        heads: number of heads per layer.

    Attributes:
        low: lower ends of the ranges, `(layers, statistics, prompts, heads)`.
        high: upper ends.
        reach: how far the ranges are widened.
    """

    def __init__(self, train_length: int, *, layers: int, prompts: Sequence[str], heads: int):
        self.train_length, self.prompts = train_length, list(prompts)
        shape = (layers, len(STATISTICS), len(prompts), heads)
        # A prompt starts from the zero state, so every range includes zero.
        self.low, self.high, self.reach, self.outside = torch.zeros(4, *shape, dtype=torch.float64)
        self.onset = torch.full(shape, math.inf)
        self.beyond = 0
        self.retention: list[Tensor | None] = []
        self.last: list[HeadStatistics] = []

    def see(self, position: int, readings: Sequence[HeadStatistics]) -> None:
        """Add the measurements of all layers at one position; positions must ascend."""
        values = torch.stack([torch.stack([r.mean, r.variance.sqrt(), r.norm]) for r in readings])
        self.last = list(readings)
        if position <= self.train_length:
            self.low, self.high = self.low.minimum(values), self.high.maximum(values)
            size = values[:, :2].square().sum(1).sqrt()  # root mean square
            mean = self.reach[:, 0].maximum(MARGIN * size)
            others = MARGIN * (self.high - self.low)[:, 1:]
            self.reach = torch.cat([mean[:, None], others], dim=1)
            self.retention = [reading.retention for reading in readings]
            return
        low, high = self.bounds()
        outside = ~((values >= low) & (values <= high))  # NaN counts as outside
        self.beyond += 1
        self.outside = self.outside + outside
        self.onset = self.onset.minimum(torch.where(outside, float(position), math.inf))

    def bounds(self) -> tuple[Tensor, Tensor]:
        """Return the widened ranges."""
        return self.low - self.reach, self.high + self.reach

    def findings(self) -> list[Finding]:
        """Return the results for every layer, head and prompt."""
        left = self.outside > self.beyond / 2
        layers, _, rows, heads = left.shape
        found = []
        for layer, head, row in product(range(layers), range(heads), range(rows)):
            out = left[layer, :, row, head]
            onsets = self.onset[layer, :, row, head][out]
            last = self.last[layer]
            finding = Finding(
                layer=layer,
                head=head,
                prompt=self.prompts[row],
                left=tuple(s for s, o in zip(STATISTICS, out.tolist(), strict=True) if o),
                onset=int(onsets.min()) if len(onsets) else None,
                growth=float(last.norm[row, head] / self.high[layer, 2, row, head]),
                retention=_at(self.retention[layer], row, head),
                first_share=_at(last.first_share, row, head),
            )
            found.append(finding)
        return found


def _at(values: Tensor | None, row: int, head: int) -> float | None:
    return None if values is None else float(values[row, head])
