"""The criterion of state collapse: statistics that leave their range inside the training length.

At every observed position, the entries of a head's state have a mean, a standard deviation and a
Frobenius norm. Inside the training length each of the three has a range, which includes the zero
state at the start. A head collapses if, for one of the three, more than half of the observations
beyond the training length of the same prompt lie outside that range, widened on both sides: for
deviation and norm by MARGIN of its width, so that they must exceed 1.5 × their largest value
inside; for the mean by MARGIN of the largest root mean square of the entries inside, because
changes of a mean that is small relative to the entries are not significant.

A stationary head stays inside: more than half of its observations are near its median, which is not
above 1.5 × the largest value inside. A head that still fills up at the training length, as
1 − exp(−t/τ), leaves its range if it retains more than a third of its state over the training
length.

A head is global if its retention over the training length exceeds GLOBAL on any of the prompts (the
criterion of arXiv 2504.16053).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product
from typing import NamedTuple

import torch
from torch import Tensor

MARGIN = 0.5
STATISTICS = ("mean", "deviation", "norm")
CRITERION = (
    "A head collapses where the mean, the standard deviation or the norm of its state lies, at "
    "more than half of the observations beyond the training length of the same prompt, outside its "
    "range inside the training length (the zero state at the start included). Outside means: "
    f"deviation or norm above {1 + MARGIN:g} × the largest inside; mean farther than {MARGIN:g} × "
    "the largest root mean square of the entries inside from the range of the mean."
)


class Finding(NamedTuple):
    """The result for one head on one prompt.

    Attributes:
        prompt: index.
        left: the statistics that left their range; the head collapses if there is one.
        onset: the first position beyond the training length at which one of these was outside.
        growth: the norm at the end relative to its largest value inside the training length.
        retention: over the training length; NaN if it is not defined.
        first_share: at the end; NaN if it is not defined.
    """

    layer: int
    head: int
    prompt: int
    left: tuple[str, ...]
    onset: int | None
    growth: float
    retention: float
    first_share: float


def find(
    positions: Sequence[int], values: Mapping[str, Tensor], train_length: int
) -> list[Finding]:
    """Returns one finding per layer, head and prompt.

    Args:
        positions: of the observations, ascending, some beyond the training length.
        values: STATISTICS, `retention` and `first_share`, `(positions, layers, prompts, heads)`.
        train_length: in tokens.
    """
    at = torch.tensor(positions)
    inside = at <= train_length
    seen = torch.stack([values[name] for name in STATISTICS], dim=1)
    # A prompt starts from the zero state, so every range includes zero.
    low = seen[inside].amin(0).clamp(max=0)
    high = seen[inside].amax(0).clamp(min=0)
    reach = MARGIN * (high - low)
    reach[0] = MARGIN * seen[inside, :2].square().sum(1).sqrt().amax(0)
    beyond = seen[~inside]
    outside = ~((beyond >= low - reach) & (beyond <= high + reach))  # NaN counts as outside
    left = outside.double().mean(0) > 0.5
    onset = torch.where(outside, at[~inside].view(-1, 1, 1, 1, 1), positions[-1] + 1).amin(0)
    retention = values["retention"][inside][-1]
    found = []
    for layer, head, prompt in product(*(range(seen.shape[axis]) for axis in (2, 4, 3))):
        place = layer, prompt, head
        out = left[:, *place]
        found.append(
            Finding(
                layer,
                head,
                prompt,
                left=tuple(s for s, o in zip(STATISTICS, out.tolist(), strict=True) if o),
                onset=int(onset[:, *place][out].min()) if out.any() else None,
                growth=float(values["norm"][-1][place] / high[2][place]),
                retention=float(retention[place]),
                first_share=float(values["first_share"][-1][place]),
            )
        )
    return found
