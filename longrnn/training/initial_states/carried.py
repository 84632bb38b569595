"""Policies that start rows from the final states of the step before."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from longrnn.state import LMState, detach, leaves, reset, take, unflatten
from longrnn.training.initial_states.base import INITIAL_STATES, Context, InitialState, Share


class Remembering(InitialState):
    """A policy that remembers the final states of the last step, one per micro-batch."""

    def __init__(self, context: Context, *, zero_share: float) -> None:
        super().__init__(context, zero_share=zero_share)
        self.states: dict[int, LMState] = {}

    def after(self, state: LMState, micro: int) -> None:
        self.states[micro] = detach(state)

    def forget(self) -> None:
        self.states.clear()

    def content(self) -> dict[str, Tensor]:
        return {
            f"{micro}/{name}": leaf.cpu()
            for micro, state in self.states.items()
            for name, leaf in leaves(state)
        }

    def restore(self, content: Mapping[str, Tensor]) -> None:
        for micro in sorted({int(name.split("/")[0]) for name in content}):
            like = self.context.init_state(len(content[f"{micro}/position"]))
            kept = [content[f"{micro}/{n}"].to(leaf.device) for n, leaf in leaves(like)]
            self.states[micro] = unflatten(like, kept)


@INITIAL_STATES.register("carry")
class Carry(Remembering):
    """Truncated backpropagation through time: rows are streams that continue where they stopped.

    Args:
        context: of the run.
        zero_share: share of segments that start from zero in the middle of a document.
    """

    streams = True

    def __init__(self, context: Context, *, zero_share: Share = 0.0) -> None:
        super().__init__(context, zero_share=zero_share)

    def _draw(self, zero: LMState, starts: Tensor, seeds: Sequence[int], micro: int) -> LMState:
        return reset(self.states.get(micro, zero), zero, starts)


@INITIAL_STATES.register("pass")
class Pass(Remembering):
    """State passing: independent rows start from the final states of the previous batch, shuffled.

    Rows are shuffled within each process, so that no state moves to another one: a run on two
    processes differs from a run on one process with twice the batch.

    Args:
        context: of the run.
        zero_share: share of rows that start from zero.
    """

    def __init__(self, context: Context, *, zero_share: Share = 0.1) -> None:
        super().__init__(context, zero_share=zero_share)

    def _draw(self, zero: LMState, starts: Tensor, seeds: Sequence[int], micro: int) -> LMState:
        if micro not in self.states:
            return zero
        last = self.states[micro]
        order = torch.randperm(
            len(last.position), generator=torch.Generator().manual_seed(seeds[0])
        )
        return take(last, order)._replace(position=zero.position)
