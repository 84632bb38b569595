"""`Edit`: how the recurrence of one layer is changed, as data.

A cell applies an edit in fixed stages, so that several edits of a layer merge into one:

| stage | scanning cells | stepwise cells |
| --- | --- | --- |
| 0 `rate`, `bias` | additions to the log of −A and to dt's bias | to the forget gate's bias |
| 0 `weights` | additions to the weights that make steps and gates | likewise |
| 1 `steps` | functions of the step dt and the rate A, and of x | |
| 2 `keep`, `add` | factors of the decay and of the gain | factors of those of `Update` |
| 3 `limit` | the largest norm of each head's state | the largest norm of the memory |
| 3 `window` | the state is a sum over the last tokens | the memory is a sum over the last tokens |

Stage 0 is a change that weights can express too (`Cell.fold`). Stage 3 changes a head once: it has
a limit or a window. An implementation that does not know a stage refuses an edit that has it
(`Edit.stages`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from functools import reduce
from hashlib import sha256
from typing import Any, NamedTuple

import torch
from torch import Tensor

from longrnn.errors import UserError
from longrnn.ops.scan.inputs import Decay

# Two computations of one step may differ by this many units in the last place.
ROUNDINGS = 128


class Steps(NamedTuple):
    """What a scanning cell computes the inputs of its recurrence from.

    Attributes:
        x: `(b, t, h, p)`, not yet multiplied by dt.
        dt: `(b, t, h)`, the step of x, at least 0, in the dtype of the state.
        decay: its step is dt in most cells.
        add: `(h,)`, the factor of what a token adds, in the dtype of dt; None for 1.
    """

    x: Tensor
    dt: Tensor
    decay: Decay
    add: Tensor | None = None

    @property
    def gain(self) -> Tensor:
        """`(b, t, h)`, the factor of x where the step multiplies it: dt · add."""
        return self.dt if self.add is None else self.dt * self.add

    def each(self, change: Callable[[Tensor], Tensor]) -> Steps:
        """The same change of dt and of the step of the decay."""
        dt, step = change(self.dt), self.decay.step
        step = dt if step is self.dt else change(step)
        return self._replace(dt=dt, decay=self.decay._replace(step=step))


class StepChange(NamedTuple):
    """A change of the steps by numbers per head, `(h,)` float64; None for none.

    Attributes:
        threshold: of the unchanged dt: a token with a step at or below it has step 0 and x = 0.
        step: factor of dt, and of the step of the decay.
        power: exponent of |A|.
        log_rate: logarithm of the factor of |A|, after the power, `(h, 1)`; or per key, `(h, n)`,
            in a cell whose rates are.
    """

    threshold: Tensor | None = None
    step: Tensor | None = None
    power: Tensor | None = None
    log_rate: Tensor | None = None

    def __call__(self, steps: Steps) -> Steps:
        if (largest := self.largest_ignored(steps.dt.dtype)) is not None:
            short = (steps.dt <= largest.to(steps.dt.device))[..., None]
            # x too, because 0 times an infinite input would be NaN in the state.
            steps = steps._replace(x=steps.x.masked_fill(short, 0))
            steps = steps.each(lambda step: step.masked_fill(like(short, step), 0))
        if self.step is not None:
            factor = self.step.to(steps.dt)[:, None]
            steps = steps.each(lambda step: step * like(factor, step))
        rate = steps.decay.rate
        if rate is None or (self.power is None and self.log_rate is None):
            return steps
        return steps._replace(decay=steps.decay._replace(rate=self._rate(rate)))

    def largest_ignored(self, dtype: torch.dtype) -> Tensor | None:
        """The largest dt that is ignored, `(h,)` in `dtype`; None without a threshold.

        Steps that differ from the threshold by rounding count as equal to it: a threshold taken
        from a step ignores this step, in a call of one token and of many, which round differently.
        """
        if self.threshold is None:
            return None
        return (self.threshold * (1 + ROUNDINGS * torch.finfo(dtype).eps)).to(dtype)

    def _rate(self, A: Tensor) -> Tensor:
        """The changed A. Its logarithm is computed in float64, in which no power overflows."""
        wide = A.double()
        by_key = A.ndim == 2
        power, log_rate = self.power, self.log_rate
        if power is not None:
            power = (power[:, None] if by_key else power).to(wide)
        if log_rate is not None:
            log_rate = (log_rate if by_key else log_rate[:, 0]).to(wide)
        if power is None:
            assert log_rate is not None
            wide = wide * log_rate.exp()
        else:
            log_A = (-wide).log() * power
            wide = -(log_A if log_rate is None else log_A + log_rate).exp()
        # Finite, because 0 times an infinite rate would be NaN.
        return wide.clamp(min=torch.finfo(A.dtype).min).to(A.dtype)

    def then(self, later: StepChange) -> StepChange:
        """This change followed by a later one, as a single change."""
        threshold = later.threshold
        if threshold is not None and self.step is not None:
            threshold = threshold / self.step
        log_rate = self.log_rate
        if log_rate is not None and later.power is not None:
            log_rate = log_rate * later.power[:, None]
        return StepChange(
            threshold=_both(torch.maximum, self.threshold, threshold),
            step=_both(torch.mul, self.step, later.step),
            power=_both(torch.mul, self.power, later.power),
            log_rate=_both(torch.add, log_rate, later.log_rate),
        )


def like(by_head: Tensor, step: Tensor) -> Tensor:
    """Numbers by head, `(…, h, 1)`, in the shape of steps by head or by key."""
    return by_head if step.ndim == 4 else by_head[..., 0]


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


StepFunction = Callable[[Steps], Steps]


class Edit(NamedTuple):
    """A change of the recurrence of one layer; None where a stage is unchanged.

    An edit holds options and masks of heads, and nothing that depends on weights. A stepwise cell
    counts as one head.

    Attributes:
        steps: functions without memory, applied in order; None for none.
        keep: factor of the decay of each head, `(h,)` float64, in (0, 1].
        add: factor of the input of each head, `(h,)` float64, above 0.
        limit: largest norm of each head's state, `(h,)` float64; infinite for no limit.
        window: number of last tokens that the state of a windowed head is a sum over.
        heads: the windowed heads, `(h,)` bool on the CPU, where they are counted; None for all.
        rate: added to the logarithm of each head's rate |A|, `(h, 1)` or per key `(h, n)` float64.
        bias: added to the bias of its step, or of the forget gate, `(h, 1)` or per unit `(h, k)`.
        weights: added to the parts of weights that `Cell.step_weights` names.
    """

    steps: tuple[StepFunction, ...] | None = None
    keep: Tensor | None = None
    add: Tensor | None = None
    limit: Tensor | None = None
    window: int | None = None
    heads: Tensor | None = None
    rate: Tensor | None = None
    bias: Tensor | None = None
    weights: Mapping[str, Tensor] | None = None

    @property
    def stages(self) -> Set[str]:
        """Names of the fields that change something."""
        return {name for name, value in self._asdict().items() if value is not None}

    @property
    def window_sizes(self) -> tuple[int, int]:
        """The window, and a number that differs between sets of heads; 0 for all heads."""
        assert self.window is not None
        if self.heads is None:
            return self.window, 0
        digest = sha256(bytes(self.heads.tolist())).digest()
        return self.window, int.from_bytes(digest[:4], "big")

    def refuse_unknown(self, known: Set[str], implementation: str) -> None:
        """Raises a `UserError` for a stage that an implementation does not compute."""
        if unknown := sorted(self.stages - known):
            raise UserError(
                f"{implementation} does not compute the change {unknown[0]!r} of this mitigation: "
                "use another mitigation"
            )

    def to(self, device: torch.device) -> Edit:
        """The edit with its numbers on a device; masks of heads stay on the CPU."""
        numbers = {
            name: value.to(device)
            for name, value in self._asdict().items()
            if isinstance(value, Tensor) and value.is_floating_point()
        }
        weights = self.weights and {name: part.to(device) for name, part in self.weights.items()}
        return self._replace(**numbers, weights=weights)

    @property
    def changes(self) -> tuple[StepFunction, ...]:
        """The functions of the steps in order, of which `rate` is the first."""
        if self.rate is None:
            return self.steps or ()
        first = StepChange(log_rate=self.rate)
        return (first,) if self.steps is None else _in_order((first,), self.steps)

    def biased(self, summed: Tensor) -> Tensor:
        """A bias `(h k,)`, or what it was added to, `(…, h k)`, with the additions `bias`."""
        if self.bias is None:
            return summed
        each = summed.shape[-1] // len(self.bias)
        return summed + self.bias.to(summed).expand(-1, each).flatten()

    def apply(self, steps: Steps) -> Steps:
        """The stages of a scanning cell from `rate` to 2."""
        for change in self.changes:
            steps = change(steps)
        add = None if self.add is None else self.add.to(steps.dt)
        return steps._replace(decay=steps.decay._replace(keep=self.keep), add=add)


def merge(edits: Sequence[Edit]) -> Edit:
    """The edits of a layer as a single edit: steps in order, products of factors, least limits.

    Raises:
        UserError: two windows, or a limit and a window on the same head.
    """
    return reduce(_merged, edits) if edits else Edit()


def _merged(first: Edit, second: Edit) -> Edit:
    merged = {
        name: _both(COMBINATIONS[name], getattr(first, name), getattr(second, name))
        for name in first._fields
    }
    edit = first._replace(**merged)
    if edit.window is not None and edit.limit is not None:
        limited = edit.limit < torch.inf
        if bool((limited if edit.heads is None else limited & edit.heads).any()):
            raise UserError(
                "state_norm and sliding_window both redefine the state of a head and have no "
                "meaning together: leave out either, or give them different heads"
            )
    return edit


def _both(combine: Callable[[Any, Any], Any], first: Any, second: Any) -> Any:
    """The combination of two values, or the value that is not None."""
    if first is None or second is None:
        return second if first is None else first
    return combine(first, second)


def _in_order(
    first: tuple[StepFunction, ...], second: tuple[StepFunction, ...]
) -> tuple[StepFunction, ...]:
    """Functions of the steps in order; two changes by numbers become one."""
    last, following = first[-1], second[0]
    if isinstance(last, StepChange) and isinstance(following, StepChange):
        return (*first[:-1], last.then(following), *second[1:])
    return (*first, *second)


def _refuse_two_windows(first: int, second: int) -> int:
    raise UserError(
        f"two windows in one layer, of {first} and {second} tokens, have no meaning together: give "
        "a single window"
    )


def _sums(first: Mapping[str, Tensor], second: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The additions of two edits, by weight."""
    names = [*first, *(name for name in second if name not in first)]
    return {name: _both(torch.add, first.get(name), second.get(name)) for name in names}


# How the values of two edits combine, by stage. The heads of a window belong to it.
COMBINATIONS: dict[str, Callable[[Any, Any], Any]] = {
    "steps": _in_order,
    "keep": torch.mul,
    "add": torch.mul,
    "limit": torch.minimum,
    "window": _refuse_two_windows,
    "heads": torch.logical_or,
    "rate": torch.add,
    "bias": torch.add,
    "weights": _sums,
}
