# pyright: basic, reportArgumentType=false, reportAttributeAccessIssue=false
# pyright: reportOperatorIssue=false
"""The recurrence with a limit on the norm of the state as it is defined, one token at a time.

For heads that `longrnn.ops.triton.limit` cannot compute in float32.
"""

from __future__ import annotations

import triton
import triton.language as tl

from longrnn.ops.triton.chunk import state_offsets
from longrnn.ops.triton.scan import VARYING


@triton.jit(do_not_specialize=VARYING)
def limited_by_token(
    x, gain, log_decay, B, C, limits, before, final, y, beyond, trouble, again,
    time, segment, heads, segments, x_row, x_token, B_row, B_token, C_row, C_token,
    H: tl.constexpr, R: tl.constexpr, P: tl.constexpr, N: tl.constexpr,
    BP: tl.constexpr, BN: tl.constexpr, TILES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One token after the other, from the first segment with trouble, in float64.

    Args:
        gain: of the inputs, without scales, as log_decay.
        limits: `(h,)` float64; a head with infinity has none.
        before: the state before each segment, `(segments, heads, p, n)`.
        final: the state after the last token.
        beyond: `(heads,)` int32, from `limit`.
        trouble: `(heads, segments · TILES)` int32, from `scan`.
        again: `(heads,)` int32: 1 where this kernel computes the head.
    """
    ACC: tl.constexpr = before.dtype.element_ty
    head = tl.program_id(0).to(tl.int64)
    b, h = head // H, head % H
    entry = tl.arange(0, BLOCK)
    some = entry < segments * TILES
    bad = tl.load(trouble + head * segments * TILES + entry, mask=some, other=0)
    number = tl.min(tl.where(bad != 0, entry // TILES, segments), 0)
    number = tl.minimum(number, tl.load(beyond + head))
    tl.store(again + head, (number < segments).to(tl.int32))
    if number < segments:
        largest = tl.load(limits + h)
        n, p = tl.arange(0, BN), tl.arange(0, BP)
        offsets, exists = state_offsets(n, p, P, N)
        begin = number.to(tl.int64)
        at = before + (begin * heads + head) * (P * N)
        state = tl.load(at + offsets, mask=exists, other=0.0).to(tl.float64)
        for t in range(begin * segment, time.to(tl.int64)):
            row = (b * time + t) * H + h
            g = tl.load(gain + row).to(tl.float64)
            log_of_decay = tl.load(log_decay + row).to(tl.float64)
            x_at = x + b * x_row + t * x_token + h * P
            B_at = B + b * B_row + t * B_token + h // R * N
            C_at = C + b * C_row + t * C_token + h // R * N
            x_t = tl.load(x_at + p, mask=p < P, other=0.0).to(tl.float64) * g
            B_t = tl.load(B_at + n, mask=n < N, other=0.0).to(tl.float64)
            C_t = tl.load(C_at + n, mask=n < N, other=0.0).to(ACC)
            added = x_t[None, :] * B_t[:, None]
            # After a log decay of −∞ nothing is kept, NaN included.
            kept = tl.exp(log_of_decay) * state
            state = tl.where(log_of_decay == float("-inf"), added, kept + added)
            state = tl.where(exists, state, 0.0)
            if largest < float("inf"):
                # The square of a float64 above 1e154 overflows: divide by the largest entry first.
                unit = tl.max(tl.max(tl.abs(state), 1), 0)
                unit = tl.where((unit > 0) & (unit < float("inf")), unit, 1.0)
                part = state / unit
                norm = unit * tl.sqrt(tl.sum(tl.sum(part * part, 1), 0))
                # Not a minimum, which would drop NaN: a state that is not finite becomes NaN or 0.
                scale = largest / tl.where(norm <= largest, largest, norm)
                state = tl.where(exists, state * scale, 0.0)
            # A state has the digits of its dtype between two tokens.
            state = state.to(ACC).to(tl.float64)
            read = tl.where(exists, state.to(ACC) * C_t[:, None], 0.0)
            tl.store(y + row * P + p, tl.sum(read, 0).to(y.dtype.element_ty), mask=p < P)
        tl.store(final + head * (P * N) + offsets, state.to(ACC), mask=exists)
