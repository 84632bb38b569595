"""`Edit`: how the recurrence of one layer is changed, as data.

A cell applies an edit in fixed stages, so that several edits of a layer merge into one:

| stage | scanning cells | stepwise cells |
| --- | --- | --- |
| 1 `steps` | functions of the step dt and the rate A, and of x | |
| 2 `keep`, `add` | factors of the decay and of the gain | factors of those of `Update` |
| 3 `limit` | the largest norm of each head's state | the largest norm of the memory |
| 3 `window` | the state is a sum over the last tokens | the memory is a sum over the last tokens |

Stage 3 changes a head once: it has a limit or a window.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce
from typing import NamedTuple

import torch
from torch import Tensor

from longrnn.errors import UserError


class Steps(NamedTuple):
    """What a scanning cell computes the inputs of its recurrence from.

    Attributes:
        x: `(b, t, h, p)`, not yet multiplied by dt.
        dt: `(b, t, h)`, the step, at least 0, in the dtype of the state.
        A: `(h,)` or `(b, t, h)`, the rate, below 0, in the dtype of the state.
        decay_dt: `(b, t, h)`, the step of the decay in a cell where it is not dt; None where it is.
    """

    x: Tensor
    dt: Tensor
    A: Tensor
    decay_dt: Tensor | None = None

    @property
    def log_decay(self) -> Tensor:
        """`(b, t, h)`, at most 0."""
        return (self.dt if self.decay_dt is None else self.decay_dt) * self.A

    def with_steps(self, change: Callable[[Tensor], Tensor]) -> Steps:
        """The same change of all steps."""
        decay_dt = None if self.decay_dt is None else change(self.decay_dt)
        return self._replace(dt=change(self.dt), decay_dt=decay_dt)


class StepChange(NamedTuple):
    """A change of the steps by numbers per head, `(h,)` float64; None for none.

    Attributes:
        least: a step at or below it becomes 0, and so does its x.
        step: factor of dt.
        power: exponent of |A|.
        rate: factor of A.
    """

    least: Tensor | None = None
    step: Tensor | None = None
    power: Tensor | None = None
    rate: Tensor | None = None

    def __call__(self, steps: Steps) -> Steps:
        x, dt, A, _ = steps
        if self.least is not None:
            # In the dtype of dt, so that a threshold taken from a step equals this step.
            short = dt <= self.least.to(dt)
            # x too, because 0 times an infinite input would be NaN in the state.
            steps = steps._replace(x=torch.where(short[..., None], torch.zeros_like(x), x))
            steps = steps.with_steps(lambda dt: dt.masked_fill(short, 0))
        if (step := self.step) is not None:
            steps = steps.with_steps(lambda dt: dt * step.to(dt))
        if self.power is not None:
            # In float64, which is cheap for one number per head, so that s is not rounded.
            A = -(-A.double()).pow(self.power.to(A.device)).to(A)
        return steps._replace(A=A if self.rate is None else A * self.rate.to(A))


class Update(NamedTuple):
    """How one token changes a stepwise cell's memory: memory ← keep ∘ memory + add.

    The memory is the recurrent vector: c of an LSTM, h of a GRU or an Elman cell.

    Attributes:
        add: `(b, d)`.
        keep: `(b, d)`; None where the new memory is not a linear function of the old one (Elman);
            `add` is then the new memory itself.
    """

    add: Tensor
    keep: Tensor | None


class Edit(NamedTuple):
    """A change of the recurrence of one layer; None where a stage is unchanged.

    An edit holds options and masks of heads, and nothing that depends on weights. A stepwise cell
    counts as one head.

    Attributes:
        steps: functions without memory, applied in order.
        keep: factor of the decay of each head, `(h,)` float64, in (0, 1].
        add: factor of the input of each head, `(h,)` float64, above 0.
        limit: largest norm of each head's state, `(h,)` float64; infinite for no limit.
        window: number of last tokens that the state of a windowed head is a sum over.
        heads: the windowed heads, `(h,)` bool on the CPU, where they are counted; None for all.
    """

    steps: tuple[Callable[[Steps], Steps], ...] = ()
    keep: Tensor | None = None
    add: Tensor | None = None
    limit: Tensor | None = None
    window: int | None = None
    heads: Tensor | None = None

    def to(self, device: torch.device) -> Edit:
        """The edit with its numbers on a device."""
        keep, add, limit = (None if one is None else one.to(device) for one in self[1:4])
        return self._replace(keep=keep, add=add, limit=limit)

    def numbers(self, heads: int) -> Tensor | None:
        """Stages 1, 2 and the limit as numbers per head, `(7, h)` float64, for a kernel.

        In this order: `least`, `step`, `rate` and `power` of one `StepChange`, the logarithm of
        `keep`, `add`, and `limit`. None if a step is changed by another function.
        """
        ones = torch.ones(heads, dtype=torch.float64)
        least, step, rate, power = -ones, ones, ones, ones
        for change in self.steps:
            if not isinstance(change, StepChange):
                return None
            if change.least is not None:
                least = torch.maximum(least, change.least.float() / step)
            step = step if change.step is None else step * change.step
            if change.power is not None:
                rate, power = rate**change.power, power * change.power
            rate = rate if change.rate is None else rate * change.rate
        keep, add = (ones if one is None else one for one in (self.keep, self.add))
        limit = ones * torch.inf if self.limit is None else self.limit
        return torch.stack([least, step, rate, power, keep.log(), add, limit])

    @property
    def changes_nothing(self) -> bool:
        """Whether no stage is changed."""
        return not self.steps and all(part is None for part in self[1:5])


def merge(edits: Sequence[Edit]) -> Edit:
    """The edits of one layer as one: steps in order, products of factors, the smaller limits.

    Raises:
        UserError: two windows, or a limit and a window on the same head.
    """
    return reduce(_merged, edits, Edit())


def _merged(one: Edit, other: Edit) -> Edit:
    if one.window is not None and other.window is not None:
        raise UserError(
            f"two windows in one layer, of {one.window} and {other.window} tokens, have no meaning "
            "together: give one of them"
        )
    windowed = one if other.window is None else other
    whole = Edit(
        steps=one.steps + other.steps,
        keep=_combined(torch.mul, one.keep, other.keep),
        add=_combined(torch.mul, one.add, other.add),
        limit=_combined(torch.minimum, one.limit, other.limit),
        window=windowed.window,
        heads=windowed.heads,
    )
    if whole.window is not None and whole.limit is not None:
        limited = whole.limit < torch.inf
        both = limited if whole.heads is None else limited & whole.heads
        if bool(both.any()):
            raise UserError(
                "state_norm and sliding_window both redefine the state of a head and have no "
                "meaning together: choose one, or give them different heads"
            )
    return whole


def _combined(
    function: Callable[[Tensor, Tensor], Tensor], one: Tensor | None, other: Tensor | None
) -> Tensor | None:
    if one is None or other is None:
        return other if one is None else one
    return function(one, other)
