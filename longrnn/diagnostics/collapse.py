"""The criterion of state collapse: statistics that leave their range inside the training length.

At every observed position, the entries of a head's state have a mean, a standard deviation and a
Frobenius norm. Inside the training length each of the three has a range, which includes the zero
state at the start. A head collapses if, for one of the three, more than half of the observations
beyond the training length of the same text lie outside that range, widened on both sides: for
deviation and norm by MARGIN of its width, so that they must exceed 1.5 × their largest value
inside; for the mean by MARGIN of the largest root mean square of the entries inside, because
changes of a mean that is small relative to the entries are not significant.

A stationary head stays inside: more than half of its observations are near its median, which is not
above 1.5 × the largest value inside. A head that still fills up at the training length, as
1 − exp(−t/τ), leaves its range if it retains more than a third of its state over the training
length.

A head is global if its retention over the training length exceeds GLOBAL on any of the texts (the
criterion of arXiv 2504.16053).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import NamedTuple

import torch

from longrnn.diagnostics.observe import Observation

MARGIN = 0.5
STATISTICS = ("mean", "deviation", "norm")
CRITERION = (
    "A head collapses if, at more than half of the positions beyond the training length of a text, "
    f"the norm or the standard deviation of its state is above {1 + MARGIN:g} × the largest inside "
    f"the training length, or the mean farther from its range there than {MARGIN:g} × the largest "
    "root mean square."
)


class Finding(NamedTuple):
    """The result for one head on one text.

    Attributes:
        text: index.
        left: the statistics that left their range; the head collapses if there is one.
        onset: the first position beyond the training length at which one of these was outside.
        growth: the norm at the end relative to its largest value inside the training length.
        retention: over the training length; NaN if it is not defined.
    """

    layer: int
    head: int
    text: int
    left: tuple[str, ...]
    onset: int | None
    growth: float
    retention: float


def find(seen: Sequence[Observation], train_length: int) -> list[Finding]:
    """Returns one finding per layer, head and text.

    Args:
        seen: by ascending position, some beyond the training length.
        train_length: in tokens.
    """
    at = torch.tensor([one.position for one in seen])
    inside = at <= train_length
    values = torch.stack([torch.stack([getattr(o, name) for name in STATISTICS]) for o in seen])
    # A text starts from the zero state, so every range includes zero.
    low = values[inside].amin(0).clamp(max=0)
    high = values[inside].amax(0).clamp(min=0)
    reach = MARGIN * (high - low)
    reach[0] = MARGIN * values[inside, :2].square().sum(1).sqrt().amax(0)
    beyond = values[~inside]
    outside = ~((beyond >= low - reach) & (beyond <= high + reach))  # NaN counts as outside
    left = outside.double().mean(0) > 0.5
    onset = torch.where(outside, at[~inside].view(-1, 1, 1, 1, 1), at[-1] + 1).amin(0)
    retention = seen[int(inside.sum()) - 1].retention
    found = []
    for layer, head, text in product(*(range(values.shape[axis]) for axis in (2, 4, 3))):
        place = layer, text, head
        out = left[:, *place]
        found.append(
            Finding(
                layer,
                head,
                text,
                left=tuple(s for s, o in zip(STATISTICS, out.tolist(), strict=True) if o),
                onset=int(onset[:, *place][out].min()) if out.any() else None,
                growth=float(seen[-1].norm[place] / high[2][place]),
                retention=float(retention[place]),
            )
        )
    return found
