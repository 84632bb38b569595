"""The states from which training rows start (arXiv 2507.02782; 2410.07145 for carried ones).

Notable choices:
- Random choices are a function of (seed, step, micro-batch, row of the global batch), and what a
  policy remembers is in `content`, which goes into checkpoints: a resumed run is identical bit for
  bit.
- A state is passed on as a whole: hidden and cell vectors, the state of the recurrence and that of
  the convolution. It is always detached: no gradient reaches an earlier step.
- Rows are selected by `torch.where` (`state.reset`): no NaN or infinity survives a zero start, and
  a row whose state holds one starts from zero.
- Positions start at 0 in every row, except where a state is carried: there, they continue.
"""

import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, NamedTuple

import torch
from pydantic import Field
from torch import Tensor

from longrnn import state as states
from longrnn.data import Batch
from longrnn.options import Share
from longrnn.registry import Registry
from longrnn.seeds import mix, seeded
from longrnn.state import LMState

Momentum = Annotated[float, Field(ge=0, lt=1)]
Deviation = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class Context(NamedTuple):
    """What a policy knows about its run.

    Attributes:
        init_state: of the model: zero states, or those from which it starts.
        seed: of the run.
        rank: of this process; each process has the same number of rows.
        mean: of a tensor over processes.
    """

    init_state: Callable[[int], LMState]
    seed: int = 0
    rank: int = 0
    mean: Callable[[Tensor], Tensor] = torch.clone


class InitialState(ABC):
    """A policy: from which state each training row starts.

    Args of every member's constructor: `context`; options are keyword-only.

    Attributes:
        streams: whether rows are streams: consecutive segments of documents.
        is_initial: whether rows start from `init_state` of the model, also while that is trained.
    """

    streams = False
    is_initial = False

    def __init__(self, context: Context, *, zero_share: Share = 0.1) -> None:
        self.context, self.zero_share = context, zero_share

    @property
    def remembers(self) -> bool:
        """Whether something of a step is kept for the next one."""
        return type(self).content is not InitialState.content

    def before(self, batch: Batch, step: int, micro: int) -> LMState:
        """The states from which the rows of a micro-batch start."""
        rows = len(batch.tokens)
        zero = self.context.init_state(rows)
        # The seed depends on the row's index in the global batch, not on the number of processes.
        first = self.context.rank * rows
        seeds = [mix(self.context.seed, step, micro, first + row) for row in range(rows)]
        state = self._draw(zero, batch.begins, seeds, micro)
        zeros = torch.tensor([random.Random(seed).random() < self.zero_share for seed in seeds])
        return states.reset(state, zero, zeros.to(zero.position.device) | ~_finite(state))

    def after(self, state: LMState, micro: int) -> None:  # noqa: B027 (most remember nothing)
        """Receives the states after the last tokens of a micro-batch."""

    def forget(self) -> None:  # noqa: B027
        """Makes carried rows start from zero: a batch between them and their state was left out."""

    def content(self) -> dict[str, Any]:
        """What is remembered, as tensors on the CPU; `restore` reads it back."""
        return {}

    def restore(self, content: Mapping[str, Any], rows: int, micros: int) -> None:  # noqa: B027
        """Restores the `content` of a run of these sizes; anything else raises some Exception."""

    @abstractmethod
    def _draw(self, zero: LMState, starts: Tensor, seeds: Sequence[int], micro: int) -> LMState:
        """The states of rows that do not start from zero.

        Args:
            zero: the zero states of the rows.
            starts: `(b,)` bool, rows that begin a document, see `Batch.begins`.
            seeds: one per row.
            micro: index of the micro-batch.
        """


INITIAL_STATES: Registry[InitialState] = Registry("initial state")


@INITIAL_STATES.register("zero")
class Zero(InitialState):
    """Every row starts from zero, or from the state of the model in `init_from`."""

    is_initial = True

    def __init__(self, context: Context) -> None:
        super().__init__(context, zero_share=1.0)

    def _draw(self, zero: LMState, starts: Tensor, seeds: Sequence[int], micro: int) -> LMState:
        return zero


@INITIAL_STATES.register("learned")
class LearnedState(Zero):
    """Every row, and every document in it, starts from a state that is trained (2604.01168)."""


class Remembering(InitialState):
    """A policy that remembers the final states of the last step, one per micro-batch."""

    def __init__(self, context: Context, *, zero_share: Share = 0.1) -> None:
        super().__init__(context, zero_share=zero_share)
        self.states: dict[int, LMState] = {}

    def after(self, state: LMState, micro: int) -> None:
        self.states[micro] = states.detach(state)

    def forget(self) -> None:
        self.states.clear()

    def content(self) -> dict[str, Any]:
        return {
            str(micro): {name: leaf.cpu().contiguous() for name, leaf in states.leaves(state)}
            for micro, state in self.states.items()
        }

    def restore(self, content: Mapping[str, Any], rows: int, micros: int) -> None:
        like = self.context.init_state(1)
        for micro in range(micros if content else 0):
            source = f"micro-batch {micro}"
            self.states[micro] = states.fitted(content[str(micro)], like, rows, source)


@INITIAL_STATES.register("carry")
class Carry(Remembering):
    """Truncated backpropagation through time: rows are streams that continue where they stopped.

    Args:
        context: of the run.
        zero_share: share of the rows of a step that start from zero in the middle of a document.
    """

    streams = True

    def __init__(self, context: Context, *, zero_share: Share = 0.0) -> None:
        super().__init__(context, zero_share=zero_share)

    def _draw(self, zero: LMState, starts: Tensor, seeds: Sequence[int], micro: int) -> LMState:
        return states.reset(self.states.get(micro, zero), zero, starts)


@INITIAL_STATES.register("pass")
class Pass(Remembering):
    """State passing: independent rows start from the final states of the previous batch, shuffled.

    Rows are shuffled within each process, so that no state moves to another one: a run on two
    processes differs from a run on one process with twice the batch.

    Args:
        context: of the run.
        zero_share: share of rows that start from zero.
    """

    def _draw(self, zero: LMState, starts: Tensor, seeds: Sequence[int], micro: int) -> LMState:
        if micro not in self.states:
            return zero
        last = self.states[micro]
        order = torch.randperm(len(last.position), generator=seeded(seeds[0]))
        return states.take(last, order)._replace(position=zero.position)


@INITIAL_STATES.register("fitted_noise")
class FittedNoise(InitialState):
    """Normal noise with the running mean and standard deviation of final states.

    Both are taken for each layer and head of a recurrence's state `(b, h, p, n)`, and for each
    layer and unit of any other vector. Until the first step has ended, rows start from zero.

    Args:
        context: of the run.
        zero_share: share of rows that start from zero.
        momentum: weight of the past when a batch is added to the running moments.
    """

    def __init__(
        self, context: Context, *, zero_share: Share = 0.1, momentum: Momentum = 0.99
    ) -> None:
        super().__init__(context, zero_share=zero_share)
        self.momentum = momentum
        # Running means of x and x² of each leaf, and of 1: how much the others are too small.
        self.moments: Tensor | None = None

    def after(self, state: LMState, micro: int) -> None:
        moments = [_moments(leaf.detach()).flatten() for leaf in states.recurrent(state.layers)]
        flat = self.context.mean(torch.cat([*moments, moments[0].new_ones(1)]))
        if bool(flat.isfinite().all()):  # the moments of a failed step are not used
            before = torch.zeros_like(flat) if self.moments is None else self.moments
            self.moments = before.lerp(flat, 1 - self.momentum)

    def content(self) -> dict[str, Any]:
        return {} if self.moments is None else {"moments": self.moments.cpu()}

    def restore(self, content: Mapping[str, Any], rows: int, micros: int) -> None:
        like = states.recurrent(self.context.init_state(1).layers)
        moments = torch.cat([*map(_moments, like)], 1).flatten()
        if content and content["moments"].shape != (len(moments) + 1,):
            raise ValueError(f"{len(moments)} moments and their weight were expected")
        self.moments = content["moments"].to(moments) if content else None

    def _draw(self, zero: LMState, starts: Tensor, seeds: Sequence[int], micro: int) -> LMState:
        if self.moments is None:
            return zero
        left, drawn = self.moments[:-1] / self.moments[-1], []
        for noise in _noise(states.recurrent(zero.layers), seeds):
            units = noise.shape[_unit_axis(noise)]
            (mean, square), left = left[: 2 * units].view(2, units), left[2 * units :]
            deviation = (square - mean.square()).clamp(min=0).sqrt()
            shape = (-1, 1, 1) if noise.ndim == 4 else (-1,)
            drawn.append(noise * deviation.view(shape).to(noise) + mean.view(shape).to(noise))
        return zero._replace(layers=states.with_recurrent(zero.layers, drawn))


@INITIAL_STATES.register("random_noise")
class RandomNoise(InitialState):
    """Normal noise of mean 0 and standard deviation `std` in every entry of every state.

    Args:
        context: of the run.
        zero_share: share of rows that start from zero.
        std: the standard deviation.
    """

    def __init__(self, context: Context, *, zero_share: Share = 0.1, std: Deviation = 0.1) -> None:
        super().__init__(context, zero_share=zero_share)
        self.std = std

    def _draw(self, zero: LMState, starts: Tensor, seeds: Sequence[int], micro: int) -> LMState:
        drawn = [self.std * noise for noise in _noise(states.recurrent(zero.layers), seeds)]
        return zero._replace(layers=states.with_recurrent(zero.layers, drawn))


def _noise(like: list[Tensor], seeds: Sequence[int]) -> list[Tensor]:
    """Standard normal entries in the shape of `like`, each row from its own seed."""

    def row(seed: int) -> list[Tensor]:
        draw = seeded(seed, like[0].device)
        return states.tree_map(lambda leaf: torch.empty_like(leaf[0]).normal_(generator=draw), like)

    return states.tree_map(lambda *drawn: torch.stack(drawn), *map(row, seeds))


def _unit_axis(leaf: Tensor) -> int:
    """The axis of heads in the state of a recurrence `(b, h, p, n)`; else that of units."""
    return 1 if leaf.ndim == 4 else leaf.ndim - 1


def _moments(leaf: Tensor) -> Tensor:
    """Means of x and x² for each head or unit, `(2, units)`."""
    others = [axis for axis in range(leaf.ndim) if axis != _unit_axis(leaf)]
    wide, units = leaf.double(), leaf.shape[_unit_axis(leaf)]
    # A convolution of one tap has an empty state, whose mean would be NaN.
    count = max(1, leaf.numel() // max(1, units))
    return torch.stack([wide.sum(others), wide.square().sum(others)]) / count


def _finite(state: LMState) -> Tensor:
    """`(b,)` bool: rows without NaN and infinity."""
    rows = [x.isfinite().reshape(len(x), x[0].numel()).all(1) for _, x in states.leaves(state)]
    return torch.stack(rows).all(0)
