# pyright: reportArgumentType=false, reportCallIssue=false
"""The recurrence with a limit on the norm of the state, as calls of kernels."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
from torch import Tensor

from longrnn.ops.triton import on_device
from longrnn.ops.triton.device import ONE, TWO, tile
from longrnn.ops.triton.limit import limit
from longrnn.ops.triton.limit_by_token import limited_by_token
from longrnn.ops.triton.recurrence import Operands, Plan, sizes_of, strides_of
from longrnn.ops.triton.scan import scan

# The largest change of a scale, relative to it, after which it is final.
TOLERANCE = {torch.float32: 3e-7, torch.float64: 1e-14}


class Limited(NamedTuple):
    """Results of `forward`.

    Attributes:
        y: `(b, t, h, p)`, in the dtype of the state.
        final: the state after the last token.
        before: the state before each segment, `(segments, b, h, p, n)`.
        scales: s_t, `(b, t, h)`.
        again: `(b h,)` int32, 1 where `limited_by_token` computed the head; its scales are not
            valid.
    """

    y: Tensor
    final: Tensor
    before: Tensor
    scales: Tensor
    again: Tensor


def forward(given: Operands, how: Plan, limits: Tensor) -> Limited:
    """The recurrence with a limit.

    Products that scales are computed from are not rounded in any mode: a scale that is off by 2^-9
    would leave the state above its limit.

    Args:
        given: the tensors.
        how: see `Plan`.
        limits: the largest norm of each head's state, `(h,)` float64; infinity for none.
    """
    x, state = given.x, given.state
    time, p = x.shape[1], x.shape[3]
    y, final = state.new_empty(x.shape), torch.empty_like(state)
    before = state.new_empty((how.segments, *state.shape))
    scales, log_decay = torch.empty_like(given.gain), torch.empty_like(given.log_decay)
    sizes = sizes_of(given)
    tiles = triton.cdiv(p, sizes["BP"])
    whole = sizes | {"BP": tile(p)}
    beyond, again = (state.new_empty((given.heads,), dtype=torch.int32) for _ in range(2))
    trouble = state.new_empty((given.heads, how.segments * tiles), dtype=torch.int32)
    strides = strides_of(x, given.B, given.C)
    precise = TWO.value if how.mode == ONE.value else how.mode
    with on_device(x):
        limit[(given.heads,)](
            *given[:4], limits, state, before, final, scales, log_decay, beyond,
            time, how.segment, *strides[:4], TOLERANCE[state.dtype],
            **sizes, L=how.chunk, MODE=precise, num_warps=8,
        )  # fmt: skip
        scan[how.segments * given.heads, tiles](
            x, given.gain * scales, log_decay, given.B, given.C, before, final, y, trouble,
            time, how.segment, given.heads, *strides,
            **sizes, L=how.chunk, MODE=how.mode, FINAL=False, FROM_ZERO=False, ADD=False,
            num_warps=8,
        )  # fmt: skip
        limited_by_token[(given.heads,)](
            *given[:5], limits, before, final, y, beyond, trouble, again,
            time, how.segment, given.heads, how.segments, *strides,
            **whole, TILES=tiles, BLOCK=triton.next_power_of_2(trouble.shape[1]), num_warps=8,
        )  # fmt: skip
    return Limited(y, final, before, scales, again)


def scaled(given: Operands, scales: Tensor) -> Operands:
    """The operands of the plain recurrence that equals the limited one, as in `forward`."""
    log_decay = given.log_decay.double() + scales.double().log()
    return given._replace(gain=given.gain * scales, log_decay=log_decay.to(given.log_decay.dtype))
