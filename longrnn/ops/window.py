"""A sliding window over m ← keep ∘ m + add, one token at a time, without any subtraction.

The sum over the window is kept in two stacks. In blocks of r tokens, the *front* holds sums from
each slot to the end of the previous block, and the *back* is the sum over the current block. A
token costs O(1) vector operations, and every r-th token O(r).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from longrnn.ops.rows import run_by_phase


class Term(NamedTuple):
    """`keep` and `add` of one token, or those of several tokens combined; `(b, d)` each."""

    keep: Tensor
    add: Tensor


class StepwiseCarry(NamedTuple):
    """What the window remembers.

    Attributes:
        phase: `(b,)` int64, number of tokens consumed, modulo r.
        slots: r terms: those of the current block, followed by sums to the end of the previous one.
        back: the combined term of the current block.
    """

    phase: Tensor
    slots: tuple[Term, ...]
    back: Term


def init_stepwise(memory: Tensor, window: int) -> StepwiseCarry:
    """The carry before the first token; `memory` `(b, d)` gives batch, width, device and dtype."""
    phase = torch.zeros(len(memory), dtype=torch.long, device=memory.device)
    identity = Term(torch.ones_like(memory), torch.zeros_like(memory))
    return StepwiseCarry(phase, (identity,) * window, identity)


def slide(keep: Tensor, add: Tensor, carry: StepwiseCarry) -> tuple[Tensor, StepwiseCarry]:
    """Consumes one token.

    Args:
        keep: `(b, d)`.
        add: `(b, d)`.
        carry: from `init_stepwise` or from the previous token.

    Returns:
        The sum over the window, `(b, d)`, and the new carry.
    """
    term = Term(keep.to(carry.back.keep.dtype), add.to(carry.back.add.dtype))
    return run_by_phase(_slide, carry.phase, term, carry)


def _slide(term: Term, carry: StepwiseCarry, slot: int) -> tuple[Tensor, StepwiseCarry]:
    """`slide` for rows that are all at phase `slot`."""
    slots, window = list(carry.slots), len(carry.slots)
    # `keep` of a block's first token applies to the previous block only. It must not multiply
    # the zeros of an empty back: 0 · NaN would be NaN.
    back = term if slot == 0 else _then(carry.back, term)
    slots[slot] = term
    if slot + 1 < window:
        memory = torch.addcmul(back.add, back.keep, slots[slot + 1].add)
        return memory, StepwiseCarry(carry.phase + 1, tuple(slots), back)
    memory = back.add
    # The block is complete: replace its terms by sums to its end.
    for i in range(window - 2, -1, -1):
        slots[i] = _then(slots[i], slots[i + 1])
    identity = Term(torch.ones_like(memory), torch.zeros_like(memory))
    return memory, StepwiseCarry(torch.zeros_like(carry.phase), tuple(slots), identity)


def _then(first: Term, second: Term) -> Term:
    """The combined term of two consecutive terms."""
    return Term(first.keep * second.keep, torch.addcmul(second.add, second.keep, first.add))
