"""The numbers that `fit` trains: additions to weights that set time scales, and how they begin.

Notable choices:
- Training begins with heads that forget what lies before the training length: where more than 1/e
  of a state is left after it, the addition to log |A| leaves 1/e. From 0, the many heads of a
  Mamba-1 do not find this in a few hundred steps. With keys, which are to be remembered, additions
  to log |A| begin at 0.
- Where the weights that make steps are trained too and dt is a softplus, training begins with heads
  that already tell tokens apart: in heads that remember beyond the training length, the distance of
  every step, before the softplus, from a large one is `SPREAD` times what it was. The large one is
  what a strict `token_filter` would leave.
"""

from collections.abc import Sequence
from functools import partial
from operator import attrgetter
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from longrnn.cells import Cell, Edit, merge
from longrnn.cells.scanning import inverse_softplus
from longrnn.diagnostics.job import STRICT, InsideObservations, Job
from longrnn.diagnostics.states import GLOBAL
from longrnn.mitigations import MITIGATIONS
from longrnn.mitigations.bind import check_defined

# The factor of the distance of steps from a large one.
SPREAD = 2.0
# Windows of the training length in which heads are observed.
WINDOWS = 32
# The largest retention whose logarithm is not 0.
BELOW_ONE = 1 - 1e-9


class Additions(NamedTuple):
    """The numbers that a fit trains in one layer.

    Attributes:
        rate: to log |A|, `(h, 1)`; None where a cell lacks the weight.
        bias: to the bias of steps, `(h, 1)`, or of the forget gate, `(1, k)`; likewise.
        weights: to the parts of weights in `Cell.step_weights`; empty without `select`.
    """

    rate: Tensor | None
    bias: Tensor | None
    weights: dict[str, Tensor]

    @classmethod
    def of(cls, cell: Cell, *, select: bool) -> Self:
        """Return zeros on the device of a cell.

        Raises:
            UserError: the cell has no such weights.
        """
        check_defined(MITIGATIONS["time_scales"], type(cell))
        how: dict[str, Any] = {"device": cell.device, "requires_grad": True}
        zeros = partial(torch.zeros, dtype=torch.float64, **how)
        units = 1 if cell.scans else cell.d_model
        parts = {name: attrgetter(name)(cell)[part] for name, part in cell.step_weights.items()}
        return cls(
            None if cell.rate_weight is None else zeros(cell.n_heads, 1),
            None if cell.bias_weight is None else zeros(cell.n_heads, units),
            {name: torch.zeros(weight.shape, **how) for name, weight in parts.items() if select},
        )

    def added(self, edit: Edit | None) -> Edit:
        """Return an edit with these additions."""
        own = Edit(rate=self.rate, bias=self.bias, weights=self.weights or None)
        return merge([edit or Edit(), own])


@torch.no_grad()
def begin(job: Job, text: Tensor, layers: Sequence[Additions], *, keys: bool) -> None:
    """Set the additions with which training begins.

    Args:
        job: its model.
        text: `(rows, t)`, on which heads are observed.
        layers: zeros, by layer.
        keys: whether heads are to remember what lies before the training length.
    """
    selects = any(additions.weights for additions in layers)
    forgets = not keys and any(additions.rate is not None for additions in layers)
    if not selects and not forgets:
        return
    whole = job.documents[0]._replace(tokens=text.flatten())
    inside = job._replace(documents=[whole]).inside(WINDOWS)
    if forgets:
        # exp(rate) times the sum of the log decays over the training length is −1.
        rates = -(-inside.retention.clamp(max=BELOW_ONE).log()).log()
        for additions, rate in zip(layers, rates.clamp(min=0), strict=True):
            if additions.rate is not None:
                additions.rate.copy_(rate[:, None])
    if selects:
        _spread(job, layers, inside)


def _spread(job: Job, layers: Sequence[Additions], inside: InsideObservations) -> None:
    """Set additions so that the steps of heads that remember differ more from token to token."""
    is_global, large = inside.retention > GLOBAL, inside.step_quantiles(job.share(left=STRICT))
    triples = zip(job.model.cells, job.model.edits, layers, strict=True)
    for layer, (cell, edit, additions) in enumerate(triples):
        if cell.dt_weight is None or cell.bias_weight is None or additions.bias is None:
            continue
        part = attrgetter(cell.dt_weight)(cell)[cell.step_weights[cell.dt_weight]]
        chosen = is_global[layer].to(part.device)[:, None]
        more = (SPREAD - 1) * part.reshape(cell.n_heads, -1)
        additions.weights[cell.dt_weight].copy_(more.where(chosen, 0.0).view(part.shape))
        bias = (edit or Edit()).biased(attrgetter(cell.bias_weight)(cell).flatten()).double()
        kept = inverse_softplus(torch.tensor(large[layer], dtype=torch.float64)).to(bias)
        additions.bias.copy_(((SPREAD - 1) * (bias - kept))[:, None].where(chosen, 0.0))


def listed(additions: Sequence[Tensor | None]) -> list[Any]:
    """An option of `time_scales`, by layer and head."""
    return [
        0.0 if values is None else values.detach().round(decimals=6).squeeze(1).tolist()
        for values in additions
    ]
