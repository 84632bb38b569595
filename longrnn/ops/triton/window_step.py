# pyright: basic, reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false
"""One token of the windowed recurrence in one kernel: see `longrnn.ops.ssd.window_step`.

A program computes some channels of one head of one row, and reads the number of tokens in the chunk
from the device. It goes through the tokens of the chunk backward in time, so that the sum of the
log decays from each of them to the new token only grows; then through the older tokens.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from longrnn.ops.triton import interpreting, on_device
from longrnn.ops.triton.chunk import LEAST, decayed, load_tile
from longrnn.ops.triton.device import FULL, TWO, product, tile
from longrnn.ops.triton.recurrence import LARGEST_CHUNK

if TYPE_CHECKING:
    from longrnn.ops.ssd.base import ScanInputs
    from longrnn.ops.ssd.window_step import StaticWindow

# Channels of a head that a program computes: few, so that one row occupies the whole GPU.
CHANNELS = 16
# Numbers that no kernel is compiled again for.
VARYING = ("length", "count")


@triton.jit(do_not_specialize=VARYING)
def consume(
    x, gain, log_decay, B, C, own_x, own_gain, own_log_decay, own_B,
    older_x, older_B, older_weight, start, offset, y, state, length, count,
    H: tl.constexpr, R: tl.constexpr, P: tl.constexpr, N: tl.constexpr,
    BP: tl.constexpr, BN: tl.constexpr, L: tl.constexpr, MODE: tl.constexpr,
):  # fmt: skip
    """y and the state of one token; writes the token into its slot. Grid: heads, channels.

    Args:
        x: `(b, h, p)`; all tensors are contiguous.
        gain: `(b, h)`.
        log_decay: `(b, h)`.
        B: `(b, g, n)`.
        C: `(b, g, n)`.
        own_x: `(b, length, h, p)`, the current chunk, like the next three.
        own_gain: `(b, length, h)`.
        own_log_decay: `(b, length, h)`.
        own_B: `(b, length, g, n)`.
        older_x: `(b, count, h, p)`.
        older_B: `(b, count, g, n)`.
        older_weight: `(b, count, h)`.
        start: `(b, h, p, n)`.
        offset: `(b,)`.
        y: `(b, h, p)`.
        state: `(b, h, p, n)`.
    """
    ACC: tl.constexpr = start.dtype.element_ty
    NARROW: tl.constexpr = own_x.dtype.element_ty
    G: tl.constexpr = H // R
    program = tl.program_id(0).to(tl.int64)
    b, h = program // H, program % H
    g = h // R
    j, n = tl.arange(0, L), tl.arange(0, BN)
    p = tl.program_id(1) * BP + tl.arange(0, BP)
    here, there = p < P, n < N
    now = tl.load(offset + b)

    # The token, in the dtypes of the chunk.
    x_now = tl.load(x + program * P + p, mask=here, other=0.0).to(NARROW)
    B_now = tl.load(B + (b * G + g) * N + n, mask=there, other=0.0).to(NARROW)
    C_now = tl.load(C + (b * G + g) * N + n, mask=there, other=0.0).to(ACC)
    gain_now, decay_now = tl.load(gain + program), tl.load(log_decay + program)
    # Rows that have ended, and tokens of a warm-up, may stand past the last slot.
    if now < length:
        slot = b * length + now
        tl.store(own_x + (slot * H + h) * P + p, x_now, mask=here)
        if tl.program_id(1) == 0:
            tl.store(own_gain + slot * H + h, gain_now)
            tl.store(own_log_decay + slot * H + h, decay_now)
            if h % R == 0:
                tl.store(own_B + (slot * G + g) * N + n, B_now, mask=there)

    # The tokens of the chunk.
    added = (x_now.to(ACC) * gain_now.to(ACC))[None, :] * B_now.to(ACC)[:, None]
    after = decay_now.to(tl.float64)
    after = tl.where(after < LEAST, LEAST, after)  # unlike a maximum, this keeps NaN
    filled = tl.minimum(now, length)
    tiles = tl.cdiv(filled, L).to(tl.int32)
    for i in range(tiles):
        first = (tiles - 1 - i) * L
        left = tl.minimum(filled - first, L).to(tl.int32)
        at = (b * length + first + j) * H + h
        wide = tl.load(own_log_decay + at, mask=j < left, other=0.0).to(tl.float64)
        wide = tl.where(wide < LEAST, LEAST, wide)
        total = tl.sum(wide, 0)
        weight = tl.exp(after + (total - tl.cumsum(wide, 0))).to(ACC)
        weight *= tl.load(own_gain + at, mask=j < left, other=0.0).to(ACC)
        xs = load_tile(own_x, b, first, h * P, length * H * P, H * P, j, p, left, P)
        Bs = load_tile(own_B, b, first, g * N, length * G * N, G * N, j, n, left, N)
        added += product(tl.trans(Bs), xs.to(ACC) * weight[:, None], ACC, NARROW, MODE)
        after += total

    # Everything before the chunk.
    offsets = program * (P * N) + p[None, :] * N + n[:, None]
    exists = there[:, None] & here[None, :]
    before = tl.load(start + offsets, mask=exists, other=0.0)
    found = decayed(before, added, after, ACC)
    to_token = tl.exp(after).to(ACC)
    for i in range(tl.cdiv(count - now, L).to(tl.int32)):
        first = now + i * L
        left = tl.minimum(count - first, L).to(tl.int32)
        at = (b * count + first + j) * H + h
        weight = to_token * tl.load(older_weight + at, mask=j < left, other=0.0)
        xs = load_tile(older_x, b, first, h * P, count * H * P, H * P, j, p, left, P)
        Bs = load_tile(older_B, b, first, g * N, count * G * N, G * N, j, n, left, N)
        found += product(tl.trans(Bs), xs.to(ACC) * weight[:, None], ACC, NARROW, MODE)

    tl.store(state + offsets, found, mask=exists)
    read = tl.where(exists, found * C_now[:, None], 0.0)
    tl.store(y + program * P + p, tl.sum(read, 0), mask=here)


def step(inputs: ScanInputs, static: StaticWindow) -> tuple[Tensor, Tensor]:
    """y `(b, 1, h, p)` and the state after one token per row; see `consume`."""
    x, start = static.current.x, static.start
    b, h, p, n = start.shape
    mode = TWO if x.dtype == torch.bfloat16 and start.dtype == torch.float32 else FULL
    chunk = tile(x.shape[1])
    if not interpreting():
        chunk = min(chunk, LARGEST_CHUNK[x.dtype if mode is TWO else start.dtype])
    channels = min(CHANNELS, tile(p))
    y, state = start.new_empty(b, 1, h, p), torch.empty_like(start)
    token = (one[:, 0].contiguous() for one in inputs)
    with on_device(y):
        consume[b * h, triton.cdiv(p, channels)](
            *token, *static.current, *static.older, start, static.offset, y, state,
            x.shape[1], static.older.x.shape[1],
            H=h, R=h // static.current.B.shape[2], P=p, N=n, BP=channels, BN=tile(n),
            L=chunk, MODE=mode.value, num_warps=4,
        )  # fmt: skip
    return y, state
