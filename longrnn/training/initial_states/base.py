"""The contract of a policy of initial states (arXiv 2507.02782; 2410.07145 for carried ones).

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

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, NamedTuple

import torch
from pydantic import Field
from torch import Tensor

from longrnn.data import Batch
from longrnn.registry import Registry
from longrnn.seeds import mix
from longrnn.state import LMState, leaves, reset

Share = Annotated[float, Field(ge=0, le=1)]


class Context(NamedTuple):
    """What a policy knows about its run.

    Attributes:
        init_state: returns the zero states of a number of rows, on the run's device.
        seed: of the run.
        rank: of this process.
        world_size: number of processes, each with the same number of rows.
        total: sums a tensor over processes.
    """

    init_state: Callable[[int], LMState]
    seed: int
    rank: int
    world_size: int
    total: Callable[[Tensor], Tensor]


class InitialState(ABC):
    """A policy: from which state each training row starts.

    Args of every member's constructor: `context`; options are keyword-only.

    Attributes:
        streams: whether rows are streams: consecutive segments of documents.
        whole_states: whether states are zero or reached by reading tokens, with all that a
            mitigation remembers of them.
    """

    streams = False
    whole_states = True

    def __init__(self, context: Context, *, zero_share: Share = 0.1) -> None:
        self.context, self.zero_share = context, zero_share

    def before(self, batch: Batch, step: int, micro: int) -> LMState:
        """The states from which the rows of a micro-batch start."""
        rows = len(batch.tokens)
        zero = self.context.init_state(rows)
        # The seed depends on the row's index in the global batch, not on the number of processes.
        first = self.context.rank * rows
        seeds = [mix(self.context.seed, step, micro, first + row) for row in range(rows)]
        state = self._draw(zero, batch.begins, seeds, micro)
        zeros = [random.Random(seed).random() < self.zero_share for seed in seeds]
        return reset(state, zero, torch.tensor(zeros).to(zero.position.device) | ~_finite(state))

    def after(self, state: LMState, micro: int) -> None:  # noqa: B027 (most remember nothing)
        """Receives the states after the last tokens of a micro-batch."""

    def forget(self) -> None:  # noqa: B027
        """Makes carried rows start from zero: a batch between them and their state was left out."""

    def content(self) -> dict[str, Tensor]:
        """The remembered tensors, on the CPU; `restore` reads them back."""
        return {}

    def restore(self, content: Mapping[str, Tensor]) -> None:  # noqa: B027
        """Restores what `content` returned."""

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
    """Every row starts from zero."""

    def __init__(self, context: Context) -> None:
        super().__init__(context, zero_share=1.0)

    def _draw(self, zero: LMState, starts: Tensor, seeds: Sequence[int], micro: int) -> LMState:
        return zero


def _finite(state: LMState) -> Tensor:
    """`(b,)` bool: rows without NaN and infinity."""
    rows = [x.isfinite().reshape(len(x), -1).all(1) for _, x in leaves(state)]
    return torch.stack(rows).all(0)
