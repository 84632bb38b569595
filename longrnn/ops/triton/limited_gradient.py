# pyright: reportArgumentType=false, reportCallIssue=false
"""The gradient of the recurrence with a limit on the norm of the state, as calls of kernels."""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor

from longrnn.ops.triton import on_device
from longrnn.ops.triton.device import ONE
from longrnn.ops.triton.limit_gradient import add_grad_b, limit_inputs, limit_walk
from longrnn.ops.triton.limit_system import limit_outputs, limit_system
from longrnn.ops.triton.limited import scaled
from longrnn.ops.triton.recurrence import Operands, Plan, packed, sizes_of, start_walk, strides_of
from longrnn.ops.triton.recurrence_gradient import (
    BYTES_AT_ONCE,
    Gradients,
    OfLimit,
    chunk_gradients,
    empty_gradients,
    summed,
)


def backward(
    given: Operands,
    how: Plan,
    scales: Tensor,
    before: Tensor,
    grad_y: Tensor | None,
    grad_final: Tensor | None,
) -> Gradients:
    """The gradients of all tensors.

    The tables of all chunks are known for some segments at a time, as in `recurrence_gradient`;
    those of later segments are computed first.

    Args:
        given: the tensors.
        how: as in the forward pass.
        scales: from the forward pass, `(b, t, h)`.
        before: the states before segments, from the forward pass, `(segments, b, h, p, n)`.
        grad_y: `(b, t, h, p)`; None for 0.
        grad_final: `(b, h, p, n)`; None for 0.
    """
    state, g = given.state, given.B.shape[2]
    h, p = given.x.shape[2:]
    # The gradient of the state after the current group of segments; finally that of the first one.
    now = torch.zeros_like(state)
    if grad_final is not None:
        now.copy_(grad_final)
    if grad_y is None:
        grad_y = state.new_zeros(1, 1, h, p).expand(given.x.shape)
    grad_y = packed(grad_y)
    given = scaled(given, scales)
    found = empty_gradients(given, now)
    chunks, at_once = how.segment // how.chunk, _segments_at_once(given, how)
    narrow = given.x.dtype if how.mode == ONE.value else state.dtype
    every = (at_once * chunks, *state.shape)
    at_starts, at_ends = (state.new_empty(every, dtype=narrow) for _ in range(2))
    tables = (at_once * chunks, given.heads, how.chunk, how.chunk)
    contributions, inverse = (state.new_empty(tables) for _ in range(2))
    taken = state.new_empty((at_once * chunks, given.heads, how.chunk, p))
    tau, with_start = (torch.empty_like(scales) for _ in range(2))
    of_limit = OfLimit(scales, tau, with_start, contributions, taken)
    with on_device(state):
        for start in reversed(range(0, how.segments, at_once)):
            stop = min(how.segments, start + at_once)
            part, skip = how._replace(segments=stop - start), start * how.segment
            start_walk(
                (given.x, given.gain, given.log_decay, given.B),
                before[start:stop], at_starts, None, None, given, part, reverse=False, skip=skip,
            )  # fmt: skip
            _walk_back(given, part, skip, grad_y, at_starts, at_ends, now, inverse, of_limit)
            chunk_gradients(given, part, skip, grad_y, at_starts, at_ends, found, of_limit)
            _add_to_grad_b(given, part, skip, at_starts, tau, found)
    return summed(found, g)


def _segments_at_once(given: Operands, how: Plan) -> int:
    """How many segments have their states, gradients of states and tables in memory."""
    state, chunk = given.state, how.chunk
    narrow = given.x.dtype if how.mode == ONE.value else state.dtype
    states = state.numel() * narrow.itemsize
    tables = given.heads * chunk * (2 * chunk + state.shape[2]) * state.dtype.itemsize
    segment = (how.segment // chunk) * (2 * states + tables)
    return min(how.segments, max(1, 2 * BYTES_AT_ONCE // segment))


def _options(given: Operands, part: Plan) -> dict[str, Any]:
    sizes = sizes_of(given) | {"L": part.chunk, "MODE": part.mode, "num_warps": 8}
    # Tiles of float64 that are loaded ahead of time would fill the shared memory of an A100.
    return sizes | {"num_stages": 2 if given.state.dtype == torch.float64 else 3}


def _chunks(given: Operands, part: Plan, skip: int) -> int:
    tokens = min(part.segments * part.segment, given.x.shape[1] - skip)
    return triton.cdiv(tokens, part.chunk)


def _walk_back(
    given: Operands,
    part: Plan,
    skip: int,
    grad_y: Tensor,
    at_starts: Tensor,
    at_ends: Tensor,
    now: Tensor,
    inverse: Tensor,
    of_limit: OfLimit,
) -> None:
    """Finds the gradients of the states after chunks, and what `grad_x` reads.

    Args:
        given: with scales.
        part: `Plan` of some segments.
        skip: tokens before them.
        grad_y: `(b, t, h, p)`.
        at_starts: the state before each of their chunks.
        at_ends: written: the gradient of the state after each of them.
        now: the gradient of the state after the last one; then that before the first one.
        inverse: of the equations of each chunk; written.
        of_limit: see `OfLimit`; all but the scales are written.
    """
    options, chunks = _options(given, part), _chunks(given, part, skip)
    scales, tau, with_start, contributions, taken = of_limit
    all_heads = (chunks * given.heads,)
    ahead = (*given[:3], scales, given.B)
    both = (*ahead, given.C, grad_y, at_starts)
    numbers, strides = (given.x.shape[1], given.heads, skip), strides_of(given.x, given.B)
    more = [*strides, *strides_of(given.C, grad_y)]
    rho = torch.empty_like(tau)
    limit_outputs[all_heads](*both, rho, *numbers, *more, **options)
    limit_system[all_heads](
        *ahead, at_starts, with_start, contributions, inverse, *numbers, *strides, **options
    )
    limit_walk[(given.heads,)](
        *both, at_ends, now, inverse, rho, tau, *numbers, chunks, *more, **options
    )
    limit_inputs[all_heads](
        *given[:3], tau, given.B, at_starts, taken, *numbers, *strides, **options
    )


def _add_to_grad_b(
    given: Operands, part: Plan, skip: int, at_starts: Tensor, tau: Tensor, found: Gradients
) -> None:
    """Adds what τ contributes to the gradient of B in some segments."""
    b, time, h, _ = given.x.shape
    parts = found.B.shape[2]
    add_grad_b[(_chunks(given, part, skip) * b * parts,)](
        *given[:3], tau, given.B, at_starts, found.B,
        time, given.heads, skip, *strides_of(given.x, given.B),
        **_options(given, part), AT_ONCE=h // parts,
    )  # fmt: skip
