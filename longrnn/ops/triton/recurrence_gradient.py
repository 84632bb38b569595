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
# Bytes of the states of all chunks, and again of their gradients, that are kept at a time.
BYTES_AT_ONCE = 2**30


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


class OfLimit(NamedTuple):
    """What `grad_x` reads under a limit on the norm of the state.

    See `longrnn.ops.triton.limit_gradient`.

    Attributes:
        scales: s_t, `(b, t, h)`.
        tau: τ_t, `(b, t, h)`.
        with_start: ⟨h_t, S⟩, `(b, t, h)`.
        contributions: E of every chunk, `(chunks, b h, L, L)`.
        taken: the terms of τ in G_t B_t, `(chunks, b h, L, p)`.
    """

    scales: Tensor
    tau: Tensor
    with_start: Tensor
    contributions: Tensor
    taken: Tensor


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
    h, p = given.x.shape[2:]
    grad_final = torch.zeros_like(state) if grad_final is None else grad_final.contiguous()
    if grad_y is None:
        grad_y = state.new_zeros(1, 1, h, p).expand(given.x.shape)
    grad_y = packed(grad_y)
    grad_state = torch.empty_like(state)
    back = (grad_y, given.gain, given.log_decay, given.C)
    with on_device(state):
        if how.segments == 1:
            before, after = state[None], grad_final[None]
        else:
            if before is None:
                before = segment_states(given, how, torch.empty_like(state))
            after = states_between(back, grad_final, given, how, grad_state, reverse=True)
        return _in_groups(given, how, grad_y, before, after, grad_state)


def _in_groups(
    given: Operands, how: Plan, grad_y: Tensor, before: Tensor, after: Tensor, grad_state: Tensor
) -> Gradients:
    """`Gradients` from the states before segments and the gradients of those after them.

    The states of all chunks are known for some segments at a time: those of a long call would take
    more memory than everything else.

    Args:
        given: the tensors.
        how: of the whole call.
        grad_y: `(b, t, h, p)`.
        before: `(segments, b, h, p, n)`.
        after: likewise.
        grad_state: the gradient of the state before the call; written if there is one segment.
    """
    state, chunks = given.state, how.segment // how.chunk
    narrow = given.x.dtype if how.mode == ONE.value else state.dtype
    at_once = max(1, BYTES_AT_ONCE // (chunks * state.numel() * narrow.itemsize))
    at_once = min(how.segments, at_once)
    shape = (at_once * chunks, *state.shape)
    at_starts, at_ends = (state.new_empty(shape, dtype=narrow) for _ in range(2))
    found = empty_gradients(given, grad_state)
    ahead = (given.x, given.gain, given.log_decay, given.B)
    back = (grad_y, given.gain, given.log_decay, given.C)
    total = state.new_empty(state.shape[:2], dtype=torch.float64)
    ends = (grad_state, total) if how.segments == 1 else (None, None)
    for start in range(0, how.segments, at_once):
        stop = min(how.segments, start + at_once)
        part, skip = how._replace(segments=stop - start), start * how.segment
        start_walk(
            ahead, before[start:stop], at_starts, None, None, given, part, reverse=False, skip=skip
        )
        start_walk(back, after[start:stop], at_ends, *ends, given, part, reverse=True, skip=skip)
        chunk_gradients(given, part, skip, grad_y, at_starts, at_ends, found)
    return summed(found, given.B.shape[2])


def empty_gradients(given: Operands, grad_state: Tensor) -> Gradients:
    """Tensors for the gradients; those of B and C for some heads of a group each."""
    state = given.state
    b, time, h, _ = given.x.shape
    g, n = given.B.shape[2:]
    parts = h // max(k for k in range(1, HEADS_AT_ONCE + 1) if h // g % k == 0)
    dgain, dlog_decay = (state.new_empty((b, time, h)) for _ in range(2))
    dB, dC = (state.new_empty((b, time, parts, n)) for _ in range(2))
    return Gradients(given.x.new_empty(given.x.shape), dgain, dlog_decay, dB, dC, grad_state)


def summed(found: Gradients, groups: int) -> Gradients:
    """Adds up the parts of a group in the gradients of B and C."""
    if found.B.shape[2] == groups:
        return found
    return found._replace(
        B=found.B.unflatten(2, (groups, -1)).sum(3), C=found.C.unflatten(2, (groups, -1)).sum(3)
    )


def chunk_gradients(
    given: Operands,
    part: Plan,
    skip: int,
    grad_y: Tensor,
    at_starts: Tensor,
    at_ends: Tensor,
    found: Gradients,
    of_limit: OfLimit | None = None,
) -> None:
    """Writes the gradients of some segments.

    Args:
        given: the tensors.
        part: `Plan` of these segments.
        skip: tokens before them.
        grad_y: `(b, t, h, p)`.
        at_starts: the state before each of their chunks.
        at_ends: the gradient of the state after each of them.
        found: of the whole call.
        of_limit: of a limit on the norm of the state.
    """
    b, time, h, _ = given.x.shape
    chunks = triton.cdiv(min(part.segments * part.segment, time - skip), part.chunk)
    parts = found.B.shape[2]
    args = (*given[:5], grad_y, at_starts, at_ends)
    numbers = (time, given.heads, skip, *strides_of(given.x, given.B, given.C, grad_y))
    sizes: dict[str, Any] = sizes_of(given) | {"L": part.chunk, "MODE": part.mode, "num_warps": 8}
    # Tiles of float64 that are loaded ahead of time would fill the shared memory of an A100.
    sizes["num_stages"] = 2 if given.state.dtype == torch.float64 else 3
    any_state = given.state
    grad_x[(chunks * given.heads,)](
        *args, found.x, found.gain, found.log_decay, *(of_limit or (any_state,) * 5),
        *numbers, **sizes, LIMITED=of_limit is not None,
    )  # fmt: skip
    grad_bc[(chunks * b * parts,)](*args, found.B, found.C, *numbers, **sizes, AT_ONCE=h // parts)
