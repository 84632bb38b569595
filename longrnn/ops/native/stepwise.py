"""RNN, GRU and LSTM in C++, with changes of their updates that are known as numbers."""

from __future__ import annotations

import ctypes
import math
from typing import NamedTuple

import torch
from torch import Tensor

from longrnn.ops import native
from longrnn.ops.window import StepwiseCarry, Term

# In the order of the table in stepwise.h.
CELLS = ("tanh", "relu", "identity", "gru", "lstm")
# A call copies the terms of a window: calls of a smaller share of its tokens do not repay that.
WINDOW_SHARE = 1 / 16


class UpdateRule(NamedTuple):
    """What happens to every update memory ← keep ∘ memory + add of a stepwise cell, as numbers.

    Attributes:
        keep: factor of `keep`.
        add: factor of `add`.
        limit: largest norm of the memory, which is rescaled to it; infinite for no limit.
        window: the terms of a sliding window, which replaces the memory by a sum over its tokens;
            None for no window.
    """

    keep: float = 1.0
    add: float = 1.0
    limit: float = math.inf
    window: StepwiseCarry | None = None


class Advanced(NamedTuple):
    """What `run` returns.

    Attributes:
        y: `(b, t, d)`, h after each token.
        h: `(b, d)`, after the last token.
        memory: `(b, d)`, after the last token.
        window: the terms of the sliding window after the last token; None without.
    """

    y: Tensor
    h: Tensor
    memory: Tensor
    window: StepwiseCarry | None


def suits(rule: UpdateRule, x: Tensor, *tensors: Tensor) -> bool:
    """Whether `run` takes the tensors of a call with inputs x `(b, t, …)`."""
    window = rule.window
    if window is not None:
        if x.shape[1] < WINDOW_SHARE * len(window.slots):
            return False
        tensors = (*tensors, *window.back, *window.slots[0], *window.slots[-1])
    given = (x, *tensors)
    return native.available() and native.suits(*given) and not native.tracked(given)


def run(
    cell: str,
    projected: Tensor,
    weight: Tensor,
    bias: Tensor,
    h: Tensor,
    memory: Tensor,
    rule: UpdateRule,
) -> Advanced:
    """Computes one token after another.

    Args:
        cell: one of `CELLS`.
        projected: `(b, t, gates · d)`, W_ih x + b_ih, with the gates in the order of torch.nn.
        weight: `(gates · d, d)`, W_hh.
        bias: `(gates · d,)`, b_hh.
        h: `(b, d)`, the output before the first token.
        memory: `(b, d)`, c of an LSTM, h of the other cells.
        rule: changes every update.
    """
    b, t, _ = projected.shape
    d = h.shape[1]
    projected, weight, bias, h, memory = (
        one.contiguous() for one in (projected, weight, bias, h, memory)
    )
    y = projected.new_empty((b, t, d))
    h_after, memory_after = torch.empty_like(h), torch.empty_like(memory)
    window = None if rule.window is None else _Terms.of(rule.window)
    kind, _ = native.KINDS[projected.dtype]
    arguments = _Stepwise(
        CELLS.index(cell), b, t, d, 0 if window is None else len(window.slots),
        *(
            one.data_ptr()
            for one in (projected, weight, bias, h, memory, y, h_after, memory_after)
        ),
        rule.keep, rule.add, rule.limit,
        *((None,) * 3 if window is None else (one.data_ptr() for one in window)),
    )  # fmt: skip
    native.call(f"longrnn_stepwise_{kind}", arguments)
    return Advanced(y, h_after, memory_after, None if window is None else window.carry())


class _Terms(NamedTuple):
    """A `StepwiseCarry` in tensors of its own, which the kernel changes.

    Attributes:
        slots: `(r, 2, b, d)`, keep and add of each slot.
        back: `(2, b, d)`.
        phase: `(b,)` int64.
    """

    slots: Tensor
    back: Tensor
    phase: Tensor

    @classmethod
    def of(cls, carry: StepwiseCarry) -> _Terms:
        flat = [part for term in carry.slots for part in term]
        slots = torch.stack(flat).unflatten(0, (len(carry.slots), 2))
        return cls(slots, torch.stack(list(carry.back)), carry.phase.clone())

    def carry(self) -> StepwiseCarry:
        slots = tuple(Term(*pair.unbind()) for pair in self.slots.unbind())
        return StepwiseCarry(self.phase, slots, Term(*self.back.unbind()))


class _Stepwise(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_long) for name in ("cell", "b", "t", "d", "window")),
        *((name, ctypes.c_void_p) for name in ("projected", "weight", "bias", "h", "memory")),
        *((name, ctypes.c_void_p) for name in ("y", "h_after", "memory_after")),
        *((name, ctypes.c_double) for name in ("keep", "add", "limit")),
        *((name, ctypes.c_void_p) for name in ("slots", "back", "phase")),
    ]
