"""A sliding window over m ← keep ∘ m + add, one token at a time, without a subtraction.

Two stacks: in blocks of r tokens, a *front* of sums from each slot to the end of the block before,
and a *back* that grows with the present block. A token costs O(1) vectors, one in r of them O(r).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from longrnn.state import take, tree_map


class Term(NamedTuple):
    """`keep` and `add` of one token, or their product and sum over several; `(b, d)` each."""

    keep: Tensor
    add: Tensor


class StepwiseCarry(NamedTuple):
    """What the window remembers.

    Attributes:
        phase: `(b,)` int64, tokens seen, modulo r.
        slots: r terms: those of the present block, behind them sums to the end of the block before.
        back: the present block's term.
    """

    phase: Tensor
    slots: tuple[Term, ...]
    back: Term


def init_stepwise(memory: Tensor, window: int) -> StepwiseCarry:
    """The carry before the first token; `memory` `(b, d)` gives batch, width, device and dtype."""
    phase = torch.zeros(len(memory), dtype=torch.long, device=memory.device)
    nothing = Term(torch.ones_like(memory), torch.zeros_like(memory))
    return StepwiseCarry(phase, (nothing,) * window, nothing)


def slide(keep: Tensor, add: Tensor, carry: StepwiseCarry) -> tuple[Tensor, StepwiseCarry]:
    """Takes in one token.

    Args:
        keep: `(b, d)`.
        add: `(b, d)`.
        carry: of `init_stepwise` or of the token before.

    Returns:
        The sum over the window, `(b, d)`, and the carry.
    """
    keep, add = keep.to(carry.back.keep.dtype), add.to(carry.back.add.dtype)
    phases = carry.phase.tolist()
    if len(set(phases)) == 1:
        return _slide(Term(keep, add), carry, phases[0])
    groups = [
        [row for row, phase in enumerate(phases) if phase == one] for one in sorted(set(phases))
    ]
    parts = [
        _slide(take(Term(keep, add), rows), take(carry, rows), phases[rows[0]]) for rows in groups
    ]
    joined = tree_map(lambda *leaves: torch.cat(leaves), *parts)
    return take(joined, torch.tensor([row for rows in groups for row in rows]).argsort())


def _slide(term: Term, carry: StepwiseCarry, slot: int) -> tuple[Tensor, StepwiseCarry]:
    slots, window = list(carry.slots), len(carry.slots)
    # What a block's first token keeps is of the block before: 0 times it could be 0 · NaN.
    back = term if slot == 0 else _then(carry.back, term)
    slots[slot] = term
    if slot + 1 < window:
        memory = torch.addcmul(back.add, back.keep, slots[slot + 1].add)
        return memory, StepwiseCarry(carry.phase + 1, tuple(slots), back)
    memory = back.add
    # The block is complete: its terms become sums to its end.
    for i in range(window - 2, -1, -1):
        slots[i] = _then(slots[i], slots[i + 1])
    nothing = Term(torch.ones_like(memory), torch.zeros_like(memory))
    return memory, StepwiseCarry(torch.zeros_like(carry.phase), tuple(slots), nothing)


def _then(first: Term, second: Term) -> Term:
    """Two terms as one."""
    return Term(first.keep * second.keep, torch.addcmul(second.add, second.keep, first.add))
