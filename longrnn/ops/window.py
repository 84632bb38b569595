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
from longrnn.state import clone


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


class StaticStepwise(NamedTuple):
    """The window between two ends of blocks, in tensors whose addresses never change.

    It belongs to one decoder. `slide_static` writes terms in place; slots from `phase` on have no
    meaning.

    Attributes:
        phase: `(b,)` int64, number of tokens consumed in the block.
        front: `(b, r, d)`, `add` of the sums from each slot to the end of the previous block.
        keep: `(b, r, d)`, of the tokens of this block.
        add: `(b, r, d)`, of the same tokens.
        back: the combined term of the current block.
    """

    phase: Tensor
    front: Tensor
    keep: Tensor
    add: Tensor
    back: Term


def static_stepwise(carry: StepwiseCarry) -> StaticStepwise:
    """The window of a carry, from which it shares no memory."""
    keep, add = (torch.stack(terms, dim=1) for terms in zip(*carry.slots, strict=True))
    return StaticStepwise(carry.phase.clone(), add, keep, add.clone(), clone(carry.back))


def stepwise_left(carry: StepwiseCarry) -> Tensor:
    """How many tokens of each row can be consumed before one that completes a block, `(b,)`."""
    return len(carry.slots) - 1 - carry.phase


def slide_static(
    keep: Tensor, add: Tensor, static: StaticStepwise
) -> tuple[Tensor, StaticStepwise]:
    """`slide` of a token that completes no block; reads no phase on the host."""
    back, phase = static.back, static.phase
    term = Term(keep.to(back.keep.dtype), add.to(back.add.dtype))
    rows = torch.arange(len(phase), device=phase.device)
    # Rows that have ended, and tokens of a warm-up, may stand past the last slot.
    last = static.front.shape[1] - 1
    slot = phase.clamp(max=last)
    static.keep[rows, slot], static.add[rows, slot] = term
    first = (phase == 0)[:, None]
    # See `_slide`: the first term must not multiply the zeros of an empty back.
    back = Term(*(torch.where(first, *pair) for pair in zip(term, _then(back, term), strict=True)))
    older = static.front[rows, (phase + 1).clamp(max=last)]
    memory = torch.addcmul(back.add, back.keep, older)
    return memory, static._replace(phase=phase + 1, back=back)


def stepwise_after(carry: StepwiseCarry, static: StaticStepwise) -> StepwiseCarry:
    """The carry after the tokens that `static`, made from `carry`, has consumed since."""
    numbers = torch.arange(len(carry.slots), device=static.phase.device)
    is_new = (numbers < static.phase[:, None])[..., None]
    keep, add = (
        torch.where(is_new, new, torch.stack(old, dim=1)).unbind(1)
        for new, old in zip((static.keep, static.add), zip(*carry.slots, strict=True), strict=True)
    )
    slots = tuple(Term(*terms) for terms in zip(keep, add, strict=True))
    return StepwiseCarry(static.phase.clone(), slots, clone(static.back))


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
