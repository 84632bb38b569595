# pyright: reportArgumentType=false, reportCallIssue=false
"""The recurrence with a limit on the norm of the state, as calls of kernels."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from longrnn.ops.triton import on_device
from longrnn.ops.triton.device import tile
from longrnn.ops.triton.limit import limit, limited_by_token
from longrnn.ops.triton.recurrence import Operands, Plan, sizes_of, strides_of
from longrnn.ops.triton.scan import scan

# The largest change of a scale, relative to it, after which it is final.
TOLERANCE = {torch.float32: 3e-7, torch.float64: 1e-14}


def forward(given: Operands, how: Plan, limits: Tensor) -> tuple[Tensor, Tensor]:
    """y `(b, t, h, p)` and the final state.

    Args:
        given: the tensors.
        how: see `Plan`.
        limits: the largest norm of each head's state, `(h,)` float64; infinity for none.
    """
    x, state = given.x, given.state
    time, p = x.shape[1], x.shape[3]
    y, final = state.new_empty(x.shape), torch.empty_like(state)
    before = state.new_empty((how.segments, *state.shape))
    gain = torch.empty_like(given.gain)
    log_decay = torch.empty_like(given.log_decay)
    sizes = sizes_of(given)
    tiles = triton.cdiv(p, sizes["BP"])
    whole = sizes | {"BP": tile(p)}
    beyond = state.new_empty((given.heads,), dtype=torch.int32)
    trouble = state.new_empty((given.heads, how.segments * tiles), dtype=torch.int32)
    strides = strides_of(x, given.B, given.C)
    with on_device(x):
        limit[(given.heads,)](
            *given[:4], limits, state, before, final, gain, log_decay, beyond,
            time, how.segment, *strides[:4], TOLERANCE[state.dtype],
            **sizes, L=how.chunk, MODE=how.mode, num_warps=8,
        )  # fmt: skip
        scan[how.segments * given.heads, tiles](
            x, gain, log_decay, given.B, given.C, before, final, y, trouble,
            time, how.segment, given.heads, *strides,
            **sizes, L=how.chunk, MODE=how.mode, FINAL=False, FROM_ZERO=False, ADD=False,
            num_warps=8,
        )  # fmt: skip
        limited_by_token[(given.heads,)](
            *given[:5], limits, before, final, y, beyond, trouble,
            time, how.segment, given.heads, how.segments, *strides,
            **whole, TILES=tiles, BLOCK=triton.next_power_of_2(trouble.shape[1]), num_warps=8,
        )  # fmt: skip
    return y, final
