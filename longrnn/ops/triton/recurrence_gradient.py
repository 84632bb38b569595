# pyright: reportArgumentType=false, reportCallIssue=false
"""The gradient of the recurrence as calls of the kernels in `scan` and `scan_gradient`."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from longrnn.ops.triton import on_device
from longrnn.ops.triton.device import ONE
from longrnn.ops.triton.recurrence import (
    Operands,
    Plan,
    packed,
    segment_states,
    sizes_of,
    start_walk,
    states_between,
    strides_of,
)
from longrnn.ops.triton.scan_gradient import grad_bc, grad_x

# Heads of a group that a program of `grad_bc` adds up, at most.
HEADS_AT_ONCE = 16


class Gradients(NamedTuple):
    """Gradients in the dtype of the state, except that of x, which has the dtype of `Operands.x`.

    Shapes are those of the tensors.
    """

    x: Tensor
    gain: Tensor
    log_decay: Tensor
    B: Tensor
    C: Tensor
    state: Tensor


def backward(
    given: Operands,
    how: Plan,
    before: Tensor | None,
    grad_y: Tensor | None,
    grad_final: Tensor | None,
) -> Gradients:
    """The gradients of all tensors.

    Args:
        given: the tensors.
        how: as in the forward pass.
        before: the states before segments, from the forward pass; None to compute them again.
        grad_y: `(b, t, h, p)`; None for 0.
        grad_final: `(b, h, p, n)`; None for 0.
    """
    state = given.state
    b, time, h, p = given.x.shape
    grad_final = torch.zeros_like(state) if grad_final is None else grad_final.contiguous()
    if grad_y is None:
        grad_y = state.new_zeros(1, 1, h, p).expand(given.x.shape)
    grad_y = packed(grad_y)
    chunks = triton.cdiv(time, how.chunk)
    narrow = given.x.dtype if how.mode == ONE.value else state.dtype
    at_starts, at_ends = (state.new_empty((chunks, *state.shape), dtype=narrow) for _ in range(2))
    grad_state = torch.empty_like(state)
    ahead = (given.x, given.gain, given.log_decay, given.B)
    back = (grad_y, given.gain, given.log_decay, given.C)
    with on_device(state):
        if how.segments == 1:
            total = state.new_empty((b, h), dtype=torch.float64)
            start_walk(ahead, state, at_starts, None, None, given, how, reverse=False)
            start_walk(back, grad_final, at_ends, grad_state, total, given, how, reverse=True)
        else:
            if before is None:
                before = segment_states(given, how, torch.empty_like(state))
            start_walk(ahead, before, at_starts, None, None, given, how, reverse=False)
            after = states_between(back, grad_final, given, how, grad_state, reverse=True)
            start_walk(back, after, at_ends, None, None, given, how, reverse=True)
        return _chunk_gradients(given, how, grad_y, at_starts, at_ends, grad_state)


def _chunk_gradients(
    given: Operands,
    how: Plan,
    grad_y: Tensor,
    at_starts: Tensor,
    at_ends: Tensor,
    grad_state: Tensor,
) -> Gradients:
    """`Gradients` from the states before all chunks and the gradients of those after them."""
    state = given.state
    b, time, h, _ = given.x.shape
    g, n = given.B.shape[2:]
    chunks = len(at_starts)
    dx = given.x.new_empty(given.x.shape)
    dgain, dlog_decay = (state.new_empty((b, time, h)) for _ in range(2))
    at_once = max(k for k in range(1, HEADS_AT_ONCE + 1) if h // g % k == 0)
    dB, dC = (state.new_empty((b, time, h // at_once, n)) for _ in range(2))
    args = (*given[:5], grad_y, at_starts, at_ends)
    numbers = (time, given.heads, *strides_of(given.x, given.B, given.C, grad_y))
    sizes: dict[str, Any] = sizes_of(given) | {"L": how.chunk, "MODE": how.mode, "num_warps": 8}
    # Tiles of float64 that are loaded ahead of time would fill the shared memory of an A100.
    sizes["num_stages"] = 2 if state.dtype == torch.float64 else 3
    grad_x[(chunks * given.heads,)](*args, dx, dgain, dlog_decay, *numbers, **sizes)
    grad_bc[(chunks * b * (h // at_once),)](*args, dB, dC, *numbers, **sizes, AT_ONCE=at_once)
    if at_once < h // g:
        dB, dC = (part.unflatten(2, (g, -1)).sum(3) for part in (dB, dC))
    return Gradients(dx, dgain, dlog_decay, dB, dC, grad_state)
